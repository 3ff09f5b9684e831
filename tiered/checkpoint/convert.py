"""Checkpoints out to the formats of others and in from them, a piece at a time: no model, no ranks, no GPU.

    tiered checkpoint --export--> huggingface   weights as safetensors, whole or in shards
                                  adamw         torch.optim.AdamW's state by name, one file for torch.load
                                  dcp           a torch.distributed.checkpoint folder: weights and optimizer
    and --import--> back, where `huggingface` may bring an `adamw` file with it

Owns names, dtypes and what fits what; each format is its own file's, what passes between them is a `State`. Invariants:
1. What does not fit (names, shapes, dtypes, a destination that is taken) is found before anything is written,
   and named.
2. Killed at any instant, the destination holds what it held before, or the whole of the new.
3. Values pass bit for bit where no dtype is asked for. Moments are fp32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from tiered.checkpoint import adamw, beside, dcp, huggingface, own
from tiered.checkpoint.chunks import METADATA
from tiered.checkpoint.dcp import Keys
from tiered.checkpoint.folder import Folder, find
from tiered.checkpoint.manifest import DTYPES
from tiered.checkpoint.slices import NAMES
from tiered.checkpoint.state import State, cast, watched
from tiered.config import parse_size
from tiered.errors import ConfigError, UsageError

Format = Literal["huggingface", "adamw", "dcp"]
FORMATS = ("huggingface", "adamw", "dcp")
Progress = Callable[[int, int], None]
"""Given the bytes done and of all, after each piece."""


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: Format = "huggingface",
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    names: Mapping[str, str] | None = None,
    keys: Keys = ("model", "optim"),
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint of `save` in another format; returns where it is. One process calls it, without a model.

    source: a folder given to `save`; where it holds several (`keep`), the one committed last is meant.
    target: where the result goes: a folder for "huggingface" (weights as safetensors) and "dcp" (weights and optimizer
        for torch.distributed.checkpoint.load), a file for "adamw" (the optimizer's state as torch has it, by name, for
        torch.load).
    dtype: of the parameters (fp32, bf16 or fp16), rounded to nearest; buffers keep theirs. None keeps each parameter's,
        as it was trained: fp32 where there was a master.
    max_shard_size: bytes of data a safetensors file has at most.
    names: {name here: name there}; keys that end in "." (or are empty) rename by the beginning.
    keys: of "dcp", under which names the model and the optimizer are ("app.model", or "" for none); None for no
        optimizer.
    force: replace what an export has left there; files of others in a folder stay.
    progress: called with the bytes done and of all; what it raises ends the export.

    At most 64 MiB of it are in memory at once. Raises UsageError for names that fit nothing and values that `dtype`
    cannot hold, StorageError where there is no checkpoint or the target is taken or cannot be written, CorruptDataError
    where the checkpoint's bytes are not those that were written. What was at `target` is then as it was.
    """
    shard_bytes = parse_size(max_shard_size, "max_shard_size")
    if format not in FORMATS:
        raise ConfigError(f"format={format!r}: use {', '.join(map(repr, FORMATS))}")
    _check_dtype(dtype)
    folder, place = find(source), _absolute(target)
    with own.opened(folder) as held:
        if folder.path in (place, *place.parents):
            raise UsageError(f"export_checkpoint(): {place} lies in the checkpoint itself: give another place")
        beside.check(place, force=force, folder=format != "adamw")
        state = _in_dtype(_renamed(held, names or {}), dtype)
        _check_kinds(state)
        if format == "adamw":
            _check_optimizer(folder, state)
            with beside.new_file(place, force=force) as file:
                adamw.write(file, _counted(dataclasses.replace(state, weights={}), progress))
        elif format == "dcp":
            if keys[1] is None:
                state = dataclasses.replace(state, moments={}, groups=None)
            with beside.new_folder(place, dcp.OWN, force=force) as made:
                dcp.write(made, _counted(state, progress), keys)
        else:
            with beside.new_folder(place, huggingface.OWN, force=force) as made:
                huggingface.write(made, _counted(dataclasses.replace(state, moments={}), progress), shard_bytes)
    return place


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    optimizer: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    names: Mapping[str, str] | None = None,
    keys: Keys = ("model", "optim"),
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the training state that another program saved as a checkpoint that `load` takes; returns its folder.

    source: a safetensors file, a folder of Hugging Face's layout, or one of torch.distributed.checkpoint.
    target: the folder of the checkpoint.
    optimizer: a file of torch.save with AdamW's state by parameter name, as "adamw" exports it, for weights without.
    dtype: of the weights (fp32, bf16 or fp16); None keeps theirs. Whatever it is, `load` fills fp32 masters exactly.
    names: {name in the source: name in the checkpoint}; keys that end in "." (or are empty) rename by the beginning.
    keys: under which names a folder of torch.distributed.checkpoint has the model and AdamW's state ("" for names
        without a beginning, None for no optimizer).
    force: replace a checkpoint at `target`.
    progress: called with the bytes done and of all; what it raises ends the import.

    Without an optimizer's state `load` begins with fresh moments. Which tensors are buffers a source may not tell:
    `load` takes each for what the model has. One process calls it; at most 64 MiB of it are in memory at once (but
    the whole storage of a tensor that is not contiguous). Nothing is ever unpickled.

    Raises UsageError for names and shapes that do not fit each other (all of them) and dtypes that there are not,
    StorageError for a file that is missing and a target that is taken, CorruptDataError for a source that is not sound.
    What was at `target` is then as it was.
    """
    _check_dtype(dtype)
    folder, path = Folder(target), _absolute(source)
    own.check(folder, force=force)
    with contextlib.ExitStack() as files:
        is_dcp = (path / METADATA).exists()
        state = files.enter_context(dcp.opened(path, keys) if is_dcp else huggingface.opened(path))
        if optimizer is not None:
            state = _joined(state, files.enter_context(adamw.opened(_absolute(optimizer))))
        _check_fit(state)
        state = _in_dtype(_renamed(state, names or {}), dtype)
        _check_weights(state)
        own.write(folder, _counted(state, progress), str(path))
    return folder.path


def _joined(weights: State, optimizer: State) -> State:
    """Weights and an optimizer's state of two files; of a tied parameter the state may have another name."""
    return dataclasses.replace(
        weights,
        moments={weights.aliases.get(name, name): m for name, m in optimizer.moments.items()},
        groups=[
            {**g, "params": [weights.aliases.get(name, name) for name in g["params"]]} for g in optimizer.groups or ()
        ],
    )


def _check_fit(state: State) -> None:
    """Raises UsageError naming all of an optimizer's state that fits no weight, or not in shape."""
    named = {name for group in state.groups or () for name in group["params"]}
    told = []
    if unexpected := [name for name in {**state.moments, **dict.fromkeys(named)} if name not in state.weights]:
        told.append(_listed("of the optimizer's state that have no weights", sorted(unexpected)))
    if missing := [name for name in state.moments if name in state.weights and state.groups and name not in named]:
        told.append(_listed("that are in none of its parameter groups", missing))
    if odd := [n for n in state.moments if n in state.weights and not state.weights[n].dtype.is_floating_point]:
        told.append(_listed("that have moments and are no floating tensors", odd))
    for name, moments in state.moments.items():
        shapes = {source.shape for _, source in moments.items()} | {getattr(state.weights.get(name), "shape", None)}
        if name in state.weights and len(shapes) > 1:
            told.append(f"{name!r} has shape {state.weights[name].shape}, its moments {moments.exp_avg.shape}")
    if told:
        raise UsageError(f"import_checkpoint(): {'; '.join(told)}")


def _check_optimizer(folder: Folder, state: State) -> None:
    if state.groups is None:
        raise UsageError(f"export_checkpoint(): {folder.path} holds weights alone, no optimizer's state")


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(os.fspath(path)))


# --- names ---


def _renamed(state: State, names: Mapping[str, str]) -> State:
    """The state under other names. Raises UsageError for keys that no name has, and names that come twice."""
    used: set[str] = set()

    def new(name: str) -> str:
        if name in names:
            used.add(name)
            return names[name]
        for begin in sorted((key for key in names if not key or key.endswith(".")), key=len, reverse=True):
            if name.startswith(begin):
                used.add(begin)
                return names[begin] + name[len(begin) :]
        return name

    def all_new(of: Mapping[str, Any]) -> dict[str, Any]:
        return {new(name): value for name, value in of.items()}

    if not names:
        return state
    made = State(
        weights=all_new(state.weights),
        buffers=None if state.buffers is None else frozenset(map(new, state.buffers)),
        aliases={new(alias): new(name) for alias, name in state.aliases.items()},
        moments=all_new(state.moments),
        groups=None if state.groups is None else [{**g, "params": [new(n) for n in g["params"]]} for g in state.groups],
    )
    if unused := [key for key in names if key not in used]:
        raise UsageError(f"names: {_listed('that fit no name', unused)}; there are {', '.join(state.weights)}")
    if len(made.weights) < len(state.weights) or made.weights.keys() & made.aliases.keys():
        new_names = [new(name) for name in (*state.weights, *state.aliases)]
        twice = sorted({name for name in new_names if new_names.count(name) > 1})
        raise UsageError(f"names: {_listed('that several would have', twice)}: give each its own")
    return made


def _listed(what: str, names: Sequence[str]) -> str:
    return f"{len(names)} {what} ({', '.join(repr(name) for name in names)})"


# --- values ---


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in DTYPES.values():
        raise ConfigError(f"dtype={dtype!r}: use torch.float32, bfloat16, float16, or None to keep each one's own")


def _in_dtype(state: State, dtype: torch.dtype | None) -> State:
    """Parameters in `dtype`; every floating tensor where it is not known which are parameters."""
    if dtype is None:
        return state
    weights = {
        name: cast(name, source, dtype)
        if source.dtype.is_floating_point and name not in (state.buffers or ())
        else source
        for name, source in state.weights.items()
    }
    return dataclasses.replace(state, weights=weights)


def _check_kinds(state: State) -> None:
    if odd := [f"{name} ({source.dtype})" for name, source in state.weights.items() if source.dtype not in NAMES]:
        raise UsageError(f"export_checkpoint(): {_listed('have a dtype that safetensors has not', odd)}")


def _check_weights(state: State) -> None:
    wide = [name for name, source in state.weights.items() if source.dtype is torch.float64]
    if wide:
        raise UsageError(f"{_listed('are float64', wide)}, which no parameter here can be: give a dtype (--dtype fp32)")


def _counted(state: State, progress: Progress | None) -> State:
    """The state; what is read of it is told."""
    if progress is None:
        return state
    done, total = 0, sum(source.nbytes for source in state.sources())

    def tell(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return state.each(lambda name, source: watched(source, tell))
