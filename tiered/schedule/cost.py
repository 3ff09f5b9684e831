"""Cost: what each part of a training step takes, in units, and the shape of the run that the parts make up. Pure data.

Owns the numbers that `schedule.simulate` and `schedule.optimum` predict with, and the arithmetic of staging.

Invariants:
1. Every number is a property of the machine (`Costs`) or of the run (`Group`, `Shape`); none is of the other.
2. `staging` gives the slots and the chunk that `optim.slots` takes for the same room.
Leaves to whom: measuring them is `tools/bench_schedule --sections simulate`'s; time itself is the simulation's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from tiered.errors import ConfigError

Overlap = Literal["none", "prefetch", "forward", "backward"]

LARGEST_CHUNK = 1 << 21
"""Elements of a chunk of states, where there is room."""
_SMALLEST_CHUNK = 1 << 19
_FEWEST_SLOTS, _MOST_SLOTS = 3, 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """One machine, on whose CPU is computed.

    drive_bytes_per_s: of chunks of states, read and written together, while the loop waits.
    fetch_bytes_per_s: of parameters read into a page, whose memory is new, while the loop waits.
    beside: the share of those rates that is left while the loop computes; above 0, at most 1.
    io_cpu_s_per_byte, fetch_cpu_s_per_byte: seconds of computing that a byte of either kind takes away which moves
        meanwhile.
    update_s_per_element: of an update whose bytes are there.
    copy_s_per_byte: of what an update hands over to a page, whose memory is new.
    use_s: of a use of a group that moves, beside computing. chunk_s: of a chunk that moves, beside its update.
    step_s: of an optimizer step beside updates.
    """

    drive_bytes_per_s: float
    fetch_bytes_per_s: float
    beside: float = 1.0
    io_cpu_s_per_byte: float = 0.0
    fetch_cpu_s_per_byte: float = 0.0
    update_s_per_element: float = 0.0
    copy_s_per_byte: float = 0.0
    use_s: float = 0.0
    chunk_s: float = 0.0
    step_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("drive_bytes_per_s", "fetch_bytes_per_s", "beside"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field}: got {getattr(self, field)}, expected more than 0")
        if self.beside > 1:
            raise ConfigError(f"beside: got {self.beside}, expected at most 1")
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}: got {value}, expected 0 or more")
        for kind, rate in (("io", self.drive_bytes_per_s), ("fetch", self.fetch_bytes_per_s)):
            if getattr(self, f"{kind}_cpu_s_per_byte") * rate * self.beside >= 1:
                raise ConfigError(f"{kind}_cpu_s_per_byte: a busy drive would leave nothing to compute: expected less")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that come and go together.

    elements: parameters. page_bytes: of the page that moves; 0 where its parameters stay in memory. state_bytes: of its
    optimizer states, those on a drive. forward_s, backward_s: of computing, everything in memory. in_backward: its
    parameters are used there. gradients: how many arrive, one after the other while its backward computes; 0 without
    an update.
    """

    name: str
    elements: int
    page_bytes: int
    state_bytes: int
    forward_s: float
    backward_s: float
    in_backward: bool = True
    gradients: int = 1

    @property
    def moved(self) -> int:
        """Bytes that an update reads and writes where nothing of them is in memory."""
        return self.page_bytes + self.state_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A run: groups in the order of forward; backward takes them from the last to the first. Gradients are in memory.

    window_bytes: for pages. slots, chunk_elements: of staging, as `staging` gives them. overlap: `Config.overlap`.
    early_share: of the elements, which are updated in backward with overlap="backward"; None: as `schedule.choice`
    balances it.
    """

    groups: tuple[Group, ...]
    window_bytes: int
    slots: int = _FEWEST_SLOTS
    chunk_elements: int = LARGEST_CHUNK
    overlap: Overlap = "prefetch"
    early_share: float | None = None

    def __post_init__(self) -> None:
        largest = max((group.page_bytes for group in self.groups), default=0)
        if self.window_bytes < largest:
            raise ConfigError(f"window_bytes: got {self.window_bytes}, expected {largest} or more, the largest page")
        for field in ("slots", "chunk_elements"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}: got {getattr(self, field)}, expected 1 or more")
        if self.overlap not in ("none", "prefetch", "forward", "backward"):
            raise ConfigError(f"overlap: got {self.overlap!r}, expected 'none', 'prefetch', 'forward' or 'backward'")


def staging(groups: Sequence[Group], room: int) -> tuple[int, int]:
    """How many slots, and of how many elements, updates of `groups` take where `room` bytes are free."""

    def slot(chunk: int) -> int:
        each = (min(chunk, g.elements) * g.moved // g.elements for g in groups if g.elements)
        return max(each, default=0)

    chunk = LARGEST_CHUNK
    while slot(chunk) * _FEWEST_SLOTS > room and chunk > _SMALLEST_CHUNK:
        chunk //= 2
    need = slot(chunk)
    return (min(_MOST_SLOTS, max(_FEWEST_SLOTS, room // need)) if need else _FEWEST_SLOTS), chunk
