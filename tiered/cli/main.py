"""The command's entry: parses, runs, reports, and turns every ending into an exit code.

    0  done          1  a drive, file or budget failed during training, or --compare-plain found a difference
    2  bad input, found before the first step          130, 143  stopped by SIGINT, SIGTERM

Owns the exit codes. A known error is one line on stderr; a traceback is a bug of this program. Whatever was trained
before the end is still reported.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import tiered
from tiered.cli.corpus import Corpus
from tiered.cli.options import Order, parse
from tiered.cli.plain import train_plain
from tiered.cli.progress import StepDisplay
from tiered.cli.signals import StopSignal
from tiered.cli.summary import Summary, show, summarize, write_json
from tiered.cli.train import Outcome, train_tiered

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (by default the process's own) and returns its exit code.

    Raises SystemExit for --help, --version and malformed options, as argparse does.
    """
    try:
        order = parse(arguments)
        if order.json is not None:
            _check_target(order.json)
        corpus = Corpus(order.files) if order.files else Corpus.standard_library()
        corpus.require(order.recipe.context + 1)
    except tiered.TieredError as error:
        return _fail(error, BAD_INPUT)
    try:
        return _run(order, corpus)
    except KeyboardInterrupt:
        print("tiered train: stopped at once by a second SIGINT", file=sys.stderr)
        return INTERRUPTED


def _run(order: Order, corpus: Corpus) -> int:
    report = sys.stderr if order.json == "-" else sys.stdout
    source = f"{corpus.nbytes:,} bytes of text in {corpus.files} files"
    print(f"{order.shape.parameters:,} parameters, {source}", file=sys.stderr)
    outcome = Outcome()
    with StopSignal() as stop:
        try:
            with StepDisplay(sys.stderr, order.recipe.steps, order.recipe.tokens) as display:
                device = train_tiered(order, corpus, stop, outcome, display.watch)
            plain = None
            if order.compare_plain and not stop.requested:
                plain = train_plain(order, corpus, device, stop)
        except tiered.TieredError as error:
            code = FAILED if outcome.losses else BAD_INPUT
            if outcome.losses:
                _report(summarize(order, outcome, None, type(error).__name__), order, report)
            return _fail(error, code)
    stopped_by = stop.received.name if stop.received else None
    summary = summarize(order, outcome, plain, stopped_by)
    _report(summary, order, report)
    if summary.plain is not None and not summary.plain.equal and not stop.requested:
        return FAILED
    return stop.exit_code


def _report(summary: Summary, order: Order, report: TextIO) -> None:
    show(summary, report)
    if order.json is not None:
        write_json(summary, order.json, sys.stdout)


def _check_target(target: str) -> None:
    """Finds out before hours of training whether the result can be written."""
    if target == "-":
        return
    path = Path(target)
    if path.is_dir():
        raise tiered.ConfigError(f"--json: got the folder {path}, expected a file or -")
    try:
        path.open("a").close()
    except OSError as error:
        raise tiered.ConfigError(f"--json: cannot write {path} ({error.strerror}); expected a writable path") from error


def _fail(error: tiered.TieredError, code: int) -> int:
    print(f"tiered train: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code
