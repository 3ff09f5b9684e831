"""Where a group's values are, which changes of that there are, and what they may have to wait for."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from tiered.device.buffer import Buffer

if TYPE_CHECKING:
    from tiered.zero.group import ParamGroup


class LazyUpdate(Protocol):
    """The update of a step, while it is not over."""

    def compute(self, group: ParamGroup, into: Buffer | None = None) -> None:
        """The group's parameters are up to date on return, and copied to `into` as well if it is given."""


class GroupState(enum.Enum):
    """Where the group's values are; see the diagram in the file's contract."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


LEGAL = {
    (GroupState.SHARDED, GroupState.GATHERING),
    (GroupState.SHARDED, GroupState.UNSHARDED),  # from an update, or from the start
    (GroupState.GATHERING, GroupState.UNSHARDED),
    (GroupState.GATHERING, GroupState.SHARDED),  # the fetch failed
    (GroupState.UNSHARDED, GroupState.SHARDED),
}
