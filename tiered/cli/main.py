"""The command's entry: parses, runs, reports, and turns every ending into an exit code.

    0  done          1  a drive, file, budget or rank failed, --compare-plain or an inspection found something
    2  bad input, found before the first step          130, 143  stopped by SIGINT, SIGTERM

Owns the exit codes. A known error is one line on stderr; a traceback is a bug of this program. Whatever was trained
before the end is still reported. Of several ranks the first reports for all; the others say only what failed.
"""

import contextlib
import sys
from collections.abc import Sequence

import torch
from torch import nn

import tiered
from tiered.cli.convert import convert
from tiered.cli.corpus import Corpus
from tiered.cli.inspect import inspect
from tiered.cli.looking import Inspecting, Reporting
from tiered.cli.options import Conversion, Order, parse
from tiered.cli.plain import train_plain
from tiered.cli.progress import StepDisplay
from tiered.cli.ranks import Place
from tiered.cli.report import report
from tiered.cli.signals import StopSignal
from tiered.cli.summary import Summary, check_target, show, summarize, write_json
from tiered.cli.train import Batches, Observer, Outcome, train_tiered

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (by default the process's own) and returns its exit code.

    Raises SystemExit for --help, --version and malformed options, as argparse does.
    """
    try:
        place = Place.told()
    except tiered.ConfigError as error:
        return _fail(error, BAD_INPUT, Place())
    with StopSignal(restore=place.alone) as stop:
        try:
            prepared = _prepare(arguments, place, stop)
            if isinstance(prepared, Conversion):
                return convert(prepared, place, stop)
            if isinstance(prepared, Inspecting):
                return inspect(prepared, place, stop)
            if isinstance(prepared, Reporting):
                return report(prepared, place, stop)
            return BAD_INPUT if prepared is None else _run(*prepared, stop)
        except KeyboardInterrupt:
            sys.stderr.write(place.complaint("stopped at once by a second SIGINT"))
            return INTERRUPTED


def _prepare(
    arguments: Sequence[str] | None, place: Place, stop: StopSignal
) -> tuple[Order, Batches] | Conversion | Inspecting | Reporting | None:
    """What to train on what, or to convert, inspect or report; None where the input is bad and has been reported."""
    speaks = place.first
    try:
        with place.spoken():
            order = parse(arguments)
        if isinstance(order, (Conversion, Inspecting, Reporting)):
            return order
        place.check_batch(order.recipe.batch)
        if order.json is not None and place.node == 0:
            check_target(order.json)
        speaks = place.first_of_node
        corpus = Corpus(order.files) if order.files else Corpus.standard_library()
        corpus.require(order.recipe.context + 1)
    except SystemExit as ended:
        if ended.code and not speaks:
            place.let_speak(stop)
        raise
    except tiered.TieredError as error:
        if speaks:
            _fail(error, BAD_INPUT, place)
        else:
            place.let_speak(stop)
        return None
    return order, Batches(corpus, order.recipe, place)


def _run(order: Order, batches: Batches, stop: StopSignal) -> int:
    place, outcome = batches.place, Outcome()
    try:
        device = _train(order, batches, stop, outcome)
        plain = None
        if order.compare_plain and place.first and not stop.requested:
            plain = train_plain(order, batches.corpus, device, stop)
    except tiered.TieredError as error:
        if outcome.losses:
            _report(summarize(order, place, outcome, None, type(error).__name__), order, place)
        if isinstance(error, tiered.ConfigError) and not place.first:
            return BAD_INPUT  # `shard` has told rank 0, where it did not fail of the same
        bad_input = not outcome.losses and not isinstance(error, tiered.RankError)
        return _fail(error, BAD_INPUT if bad_input else FAILED, place)
    stopped_by = stop.received.name if stop.received else None
    summary = summarize(order, place, outcome, plain, stopped_by)
    _report(summary, order, place)
    if summary.plain is not None and not summary.plain.equal and not stop.requested:
        return FAILED
    return stop.exit_code


def _train(order: Order, batches: Batches, stop: StopSignal, outcome: Outcome) -> torch.device:
    """The tiered run, shown by the first rank."""
    with contextlib.ExitStack() as shown:
        observe = _unseen
        if batches.place.first:
            corpus = batches.corpus
            source = f"{corpus.nbytes:,} bytes of text in {corpus.files} files"
            print(f"{order.shape.parameters:,} parameters, {source}", file=sys.stderr)
            observe = shown.enter_context(StepDisplay(sys.stderr, order.recipe.steps, order.recipe.tokens)).watch
        return train_tiered(order, batches, stop, outcome, observe)


def _unseen(model: nn.Module) -> Observer:
    return lambda step, loss, seconds: None


def _report(summary: Summary, order: Order, place: Place) -> None:
    if place.first:
        show(summary, sys.stderr if order.json == "-" else sys.stdout)
        if order.json is not None:
            write_json(summary, order.json, sys.stdout)


def _fail(error: tiered.TieredError, code: int, place: Place) -> int:
    sys.stderr.write(place.complaint(f"error: {error}"))  # in one piece, or the lines of ranks run into each other
    return code
