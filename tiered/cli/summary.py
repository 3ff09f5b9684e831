"""What a run gave, as one value: shown as a table at the end and written as JSON.

Owns the names of the JSON's fields (its keys are the fields of `Summary`, sizes in bytes, losses in nats, times in
seconds) and the words of the table. Computes nothing about a model but what `tiered.estimate` and `tiered.stats` tell.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

import tiered
from tiered.cli.options import Order
from tiered.cli.plain import TOLERANCE, largest_difference
from tiered.cli.progress import TIERS
from tiered.cli.ranks import Place
from tiered.cli.train import Outcome
from tiered.config import format_size

WIDTH = 120
"""Columns of the table where no terminal says."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The run's memory, in bytes."""

    state_bytes: int
    """Weights, gradients, masters and moments of the whole model, by `tiered.estimate`."""
    device_budget_bytes: int | None
    host_budget_bytes: int | None
    """What was given; None: chosen by the runtime."""
    budgets_of: str
    """Whose they are: those of each "rank", or of all ranks of one "node" together."""
    peak_growth_bytes: int
    """Peak resident bytes of rank 0's process above those before the model was made."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The tiered losses beside those of plain PyTorch."""

    losses: Sequence[float]
    largest_difference: float
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether the losses agree within rounding; a NaN agrees with nothing."""
        return self.largest_difference <= self.tolerance


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One finished, stopped or failed run."""

    parameters: int
    ranks: int
    stage: int
    """The ZeRO stage, which changes nothing at one rank."""
    steps: int
    stopped_by: str | None
    """Name of the signal or error that ended the run early."""
    losses: Sequence[float]
    """Means over ranks."""
    tokens_per_s: float | None
    """Median over the steps after the first, which also learns the order of use."""
    memory: Memory
    stats: tiered.Stats | None
    """Of rank 0."""
    plain: Comparison | None


def summarize(
    order: Order, place: Place, outcome: Outcome, plain: Sequence[float] | None, stopped_by: str | None
) -> Summary:
    """The summary of a run and, where it was asked for, of its plain twin."""
    settled = outcome.seconds[1:] or outcome.seconds
    estimate = tiered.estimate(order.shape.parameters, param_dtype=order.recipe.dtype)
    config = order.config
    return Summary(
        parameters=order.shape.parameters,
        ranks=place.ranks,
        stage=config.stage,
        steps=len(outcome.losses),
        stopped_by=stopped_by,
        losses=tuple(outcome.losses),
        tokens_per_s=order.recipe.tokens / statistics.median(settled) if settled else None,
        memory=Memory(
            state_bytes=estimate.total,
            device_budget_bytes=None if config.device_budget is None else int(config.device_budget),
            host_budget_bytes=None if config.host_budget is None else int(config.host_budget),
            budgets_of=config.budgets,
            peak_growth_bytes=outcome.peak_growth_bytes,
        ),
        stats=outcome.stats,
        plain=plain
        if plain is None
        else Comparison(
            losses=tuple(plain),
            largest_difference=largest_difference(outcome.losses, plain),
            tolerance=TOLERANCE[order.recipe.dtype],
        ),
    )


def check_target(target: str) -> None:
    """Finds out before hours of work whether a result can be written there: raises ConfigError where not."""
    if target == "-":
        return
    path = Path(target)
    if path.is_dir():
        raise tiered.ConfigError(f"--json: got the folder {path}, expected a file or -")
    try:
        path.open("a").close()
    except OSError as error:
        raise tiered.ConfigError(f"--json: cannot write {path} ({error.strerror}); expected a writable path") from error


def write_json(summary: Summary, target: str, stdout: TextIO) -> None:
    """Writes the summary to a path, or to `stdout` for "-". NaN and infinity, which JSON lacks, become null."""
    text = json.dumps(_jsonable(summary), indent=2, allow_nan=False) + "\n"
    if target == "-":
        stdout.write(text)
        stdout.flush()
    else:
        Path(target).write_text(text, encoding="utf-8")


def show(summary: Summary, stream: TextIO) -> None:
    """Prints the table."""
    table = Table(show_header=False, title="stopped by " + summary.stopped_by if summary.stopped_by else None)
    for name, text in _rows(summary):
        table.add_row(name, text)
    width = None if stream.isatty() else WIDTH
    Console(file=stream, highlight=False, width=width).print(table)


def _rows(summary: Summary) -> list[tuple[str, str]]:
    memory, several = summary.memory, summary.ranks > 1
    whose = f" per {memory.budgets_of}" if several else ""
    rows = [
        ("parameters", f"{summary.parameters:,}"),
        ("model states", f"{format_size(memory.state_bytes)} (weights, gradients, optimizer)"),
        (
            f"memory given{whose}",
            f"device {_size(memory.device_budget_bytes)}, host {_size(memory.host_budget_bytes)}",
        ),
        ("peak resident growth" + (" per rank" if several else ""), format_size(memory.peak_growth_bytes)),
        ("steps", str(summary.steps)),
    ]
    if several:
        rows.insert(2, ("ranks", f"{summary.ranks}, ZeRO stage {summary.stage}; what differs between them is rank 0's"))
    if summary.losses:
        rows.append(("loss first -> last", f"{summary.losses[0]:.4f} -> {summary.losses[-1]:.4f}"))
    if summary.tokens_per_s is not None:
        rows.append(("tokens/s", f"{summary.tokens_per_s:.0f}"))
    if several and summary.stats is not None:
        rows.append(("communicated a step", _communicated(summary.stats, summary.steps)))
    if summary.stats is not None:
        rows += _runtime_rows(summary.stats)
    if summary.plain is not None:
        verdict = "equal within rounding" if summary.plain.equal else "DIFFERENT"
        gap, limit = summary.plain.largest_difference, summary.plain.tolerance
        rows.append(("losses against plain PyTorch", f"{verdict}: largest difference {gap:.1e} (limit {limit:.0e})"))
    return rows


def _runtime_rows(stats: tiered.Stats) -> list[tuple[str, str]]:
    rows = []
    for kind, tiers in stats.placement.items():
        places = [f"{tier} {format_size(nbytes)}" for tier, nbytes in tiers.items() if nbytes]
        rows.append((f"  {kind} on", ", ".join(places) or "nothing"))
    for tier in TIERS:
        read, written = stats.read_bytes.get(tier, 0), stats.written_bytes.get(tier, 0)
        peak = format_size(stats.peak_bytes.get(tier, 0))
        rows.append((f"  {tier}", f"{format_size(read)} read, {format_size(written)} written, at most {peak} held"))
    rows += _step_rows(stats)
    stalled = {cause: seconds for cause, seconds in stats.stall_seconds.items() if seconds}
    if stats.drive_retries or stats.drive_stalls:
        text = f"{stats.drive_retries} reads made once more, {stats.drive_stalls} transfers late; see the warnings"
        rows.append(("ailing drives", text))
    if stalled:
        rows.append(("seconds stalled", ", ".join(f"{cause} {seconds:.2f}" for cause, seconds in stalled.items())))
    if stats.skipped_steps:
        rows.append(("steps skipped for non-finite gradients", str(stats.skipped_steps)))
    return rows


def _step_rows(stats: tiered.Stats) -> list[tuple[str, str]]:
    """How close steps come to what this machine can do, and what that costs it."""
    rows, mean = [], stats.mean_step
    if mean is not None:
        text = f"{mean.seconds:.3f} s of which {mean.bound_s:.3f} s ({mean.share:.0%}) are the bound, by {mean.binding}"
        rows.append(("a step on average", text))
        terms = sorted(mean.terms.items(), key=lambda term: -term[1])
        rows.append(("  what bounds it", ", ".join(f"{name} {seconds:.3f} s" for name, seconds in terms)))
        waited = [f"{cause} {seconds:.3f} s" for cause, seconds in mean.stall_seconds.items() if seconds >= 5e-4]
        rows.append(("  stalled in it", ", ".join(waited) or "nowhere"))
    moved = [f"{name} {count:.1f}" for name, count in stats.bytes_per_parameter.items() if count]
    if moved:
        rows.append(("bytes a parameter and step", ", ".join(moved)))
    for drive in stats.drives:
        rate = "" if drive.bytes_per_s is None else f", at most {format_size(int(drive.bytes_per_s))}/s"
        days = "" if drive.endurance_days is None else f"; its rated endurance lasts {drive.endurance_days:,.1f} days"
        written = format_size(int(drive.written_bytes))
        rows.append((f"  {drive.path}", f"{written} written a step{rate}{days}"))
    return rows


def _communicated(stats: tiered.Stats, steps: int) -> str:
    """Bytes of the whole tensors that ranks gathered and reduced, by collective, over the steps of the run."""
    each = {name: nbytes // max(1, steps) for name, nbytes in stats.collective_bytes.items() if nbytes}
    return ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in each.items()) or "nothing"


def _size(nbytes: int | None) -> str:
    return "chosen by the runtime" if nbytes is None else format_size(nbytes)


def _jsonable(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {field.name: _jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
