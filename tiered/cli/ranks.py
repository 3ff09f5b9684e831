"""This process's place among the ranks of a run, and who speaks for them.

Owns torchrun's variables, each rank's share of a batch, and the words in front of a rank's errors. Leaves all exchange
between ranks to the package's public names; before a model is sharded, ranks know of each other only what is here.

1. One process, and torchrun with one rank, are `Place()`.
2. The shares of all ranks, in rank order, are the joined batch.
3. Input that is bad on every rank is reported by one of them: of options rank 0, of files the first rank of each node,
   as each node has files of its own. The others are silent until that rank has ended, as torchrun ends all ranks as
   soon as one has failed, perhaps before the one that speaks has spoken.
"""

import contextlib
import io
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tiered.cli.signals import StopSignal
from tiered.errors import ConfigError

QUIET_SECONDS, POLL_SECONDS = 20.0, 0.05
"""How long a silent rank waits for the end of the one that speaks, and how often it looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process stands among `ranks` ranks."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    """Its number among the ranks of its node."""
    node: int = 0
    launched: bool = False
    """Whether torchrun started it, which ends all ranks of a node when one has failed."""

    @classmethod
    def told(cls, variables: Mapping[str, str] | None = None) -> "Place":
        """The place that variables (by default those of the process) tell. Raises ConfigError naming a wrong one."""
        given = os.environ if variables is None else variables
        ranks = _whole(given, "WORLD_SIZE", 1, 1, None)
        if ranks == 1:
            return cls()
        return cls(
            rank=_whole(given, "RANK", 0, 0, ranks),
            ranks=ranks,
            local_rank=_whole(given, "LOCAL_RANK", 0, 0, ranks),
            node=_whole(given, "GROUP_RANK", 0, 0, ranks),
            launched="TORCHELASTIC_RUN_ID" in given,
        )

    @property
    def first(self) -> bool:
        """Whether this rank shows progress and results for all."""
        return self.rank == 0

    @property
    def first_of_node(self) -> bool:
        """Whether this rank reports what is wrong on its machine."""
        return self.local_rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.ranks == 1

    def complaint(self, text: str) -> str:
        """One line for stderr, which says whose it is."""
        whose = "" if self.first else f"rank {self.rank}: "
        return f"tiered train: {whose}{' '.join(text.split())}\n"

    def check_batch(self, batch: int) -> None:
        """Raises ConfigError unless ranks can take equal shares of `batch` sequences."""
        if batch % self.ranks:
            near = [n for n in (batch - batch % self.ranks, batch - batch % self.ranks + self.ranks) if n]
            raise ConfigError(
                f"--batch: got {batch} sequences for {self.ranks} ranks, expected a multiple of {self.ranks} such as "
                f"{' or '.join(map(str, near))}; it counts the sequences of all ranks, and each takes an equal share"
            )

    def share(self, batch: int) -> range:
        """The rows of a joined batch of `batch` sequences that this rank takes."""
        rows = batch // self.ranks
        return range(self.rank * rows, (self.rank + 1) * rows)

    @contextlib.contextmanager
    def spoken(self) -> Iterator[None]:
        """Within, only rank 0 is heard on stdout and stderr: what is said there every rank says."""
        with contextlib.ExitStack() as silence:
            if not self.first:
                silence.enter_context(contextlib.redirect_stdout(io.StringIO()))
                silence.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield

    def let_speak(self, stop: StopSignal) -> None:
        """Waits until torchrun says by SIGTERM that the rank that speaks has ended, or for QUIET_SECONDS."""
        end = time.monotonic() + QUIET_SECONDS
        while self.launched and not stop.requested and time.monotonic() < end:
            time.sleep(POLL_SECONDS)


def _whole(given: Mapping[str, str], name: str, default: int, low: int, below: int | None) -> int:
    text = given.get(name, str(default))
    value = int(text) if text.isascii() and text.isdecimal() else -1
    if value < low or (below is not None and value >= below):
        limit = f"at least {low}" if below is None else f"from {low} to {below - 1}"
        raise ConfigError(f"{name}: got {text!r} in the environment, expected a whole number {limit}, as torchrun sets")
    return value
