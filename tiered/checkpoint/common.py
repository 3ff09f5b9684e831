"""What saving and loading have in common: a part that every rank does, and the names a checkpoint holds."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiered.errors import RankError, StorageError, TieredError
from tiered.zero.agreement import Call
from tiered.zero.model import ShardedModel


def on_every_rank(
    sharded: ShardedModel, doing: str, part: Callable[[], Any], path: Callable[[], Path], *, closes: bool = False
) -> list[Any]:
    """Do `part` on every rank; returns what it gave on each (as JSON has it), and raises on all where it failed on any.

    path: of the checkpoint, for messages. closes: no rank gives out its shards from then on.
    """
    failure: TieredError | OSError | MemoryError | None = None
    mine: Any = None
    with sharded.computing(doing):
        try:
            mine = part()
        except RankError:
            raise
        except (TieredError, OSError, MemoryError) as error:
            failure = error
    said = json.dumps([None if failure is None else f"{type(failure).__name__}: {failure}", mine])
    runtime = sharded.runtime
    detail = zlib.crc32(doing.encode())
    told = runtime.together(
        Call.SAVE, doing, lambda: [json.loads(text) for text in runtime.ranks.texts(said)], detail=detail, closes=closes
    )
    if failure is not None:
        raise failure
    for rank, (failed, _) in enumerate(told):
        if failed is not None:
            raise StorageError(0, f"{doing} failed on rank {rank}: {failed}", str(path()))
    return [given for _, given in told]


def names_of_parameters(sharded: ShardedModel) -> dict[int, list[str]]:
    """By id of the Parameter all names it has, first the one it is stored by; several where it is tied."""
    names: dict[int, list[str]] = {id(home.param): [home.name] for home in sharded.homes}
    for name, param in sharded.module.named_parameters(remove_duplicate=False):
        if name not in names.setdefault(id(param), [name]):
            names[id(param)].append(name)
    return names
