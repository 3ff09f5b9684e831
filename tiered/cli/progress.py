"""What a person sees while a run is going: one live line on a terminal, a plain line every few steps elsewhere.

Owns that line, always on the stream given (stderr), so that stdout holds results only. Reads `tiered.stats` once a step
and works on differences, so a line tells of the steps since the last one.
"""

import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import nn

import tiered
from tiered.config import format_size

TIERS = ("device", "host", "nvme")
"""Names of the tiers in `tiered.Stats`, fastest first."""

LINES, QUIET_SECONDS = 10, 10.0
"""Where nobody watches live: about how many lines a run prints, and how long it may say nothing between steps."""


class BytesDisplay:
    """Shows how many bytes of all have been moved: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, stream: TextIO, doing: str) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._doing = doing
        columns = (TextColumn(doing), BarColumn(20), DownloadColumn(binary_units=True), TransferSpeedColumn())
        self._live = Progress(*columns, console=self._console, disable=not self._console.is_terminal, transient=True)
        self._task = self._live.add_task(doing, total=None)
        self._told = time.monotonic()

    def __enter__(self) -> "BytesDisplay":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, done: int, total: int) -> None:
        """Takes note of the bytes done, of `total`."""
        if self._console.is_terminal:
            self._live.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._told >= QUIET_SECONDS:
            self._told = time.monotonic()
            self._console.print(f"{self._doing} {format_size(done)} of {format_size(total)}", markup=False)


class StepDisplay:
    """Shows steps of `model`, on a terminal live."""

    def __init__(self, stream: TextIO, steps: int, tokens: int) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._steps = steps
        self._tokens = tokens  # of one step
        self._every = max(1, steps // LINES)
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(20),
            TextColumn("{task.fields[line]}"),
        )
        self._live = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._live.add_task("train", total=steps, line="preparing")
        self._model: nn.Module | None = None
        self._told = (0, 0.0, 0.0)  # steps, seconds and seconds stalled at the last line
        self._seconds = 0.0
        self._moved: dict[str, int] = {}

    def __enter__(self) -> "StepDisplay":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def watch(self, model: nn.Module) -> "StepDisplay":
        """From here on the numbers are those of `model`."""
        self._model = model
        return self

    def __call__(self, step: int, loss: float, seconds: float) -> None:
        """Takes note of a step with its loss (nats) and its duration; prints when it is time."""
        self._seconds += seconds
        if not (self._console.is_terminal or self._due(step)):
            return
        line = f"loss {loss:.4f}  {self._since_last(step)}"
        if self._console.is_terminal:
            self._live.update(self._task, completed=step, line=line)
        else:
            self._console.print(f"step {step}/{self._steps}  {line}", markup=False)

    def _due(self, step: int) -> bool:
        told, seconds, _ = self._told
        return told == 0 or step == self._steps or not step % self._every or self._seconds - seconds >= QUIET_SECONDS

    def _since_last(self, step: int) -> str:
        """Tokens a second, bytes moved a step by tier, and the share of time spent waiting, since the last line."""
        if self._model is None:
            raise tiered.UsageError("StepDisplay: got a step before a model, expected watch(model) first")
        stats = tiered.stats(self._model)
        steps, before, stalled_before = self._told
        count, seconds = max(1, step - steps), max(1e-9, self._seconds - before)
        stalled = sum(stats.stall_seconds.values())
        parts = [f"{count * self._tokens / seconds:.0f} tokens/s"]
        for tier in TIERS:
            moved = stats.read_bytes.get(tier, 0) + stats.written_bytes.get(tier, 0)
            if moved:
                parts.append(f"{tier} {format_size((moved - self._moved.get(tier, 0)) // count)}/step")
            self._moved[tier] = moved
        parts.append(f"stalled {100 * (stalled - stalled_before) / seconds:.0f}%")
        self._told = (step, self._seconds, stalled)
        return "  ".join(parts)
