"""A checkpoint of this package as a `State`, and a `State` as a checkpoint: without a model, and without ranks.

Invariants:
1. Reading gives what was saved, hash by hash; what ranks wrote in parts is one tensor.
2. Writing goes through `Folder`, as a save does: killed at any instant, the folder holds what it held before, or the
   new checkpoint, whole.
3. Where it is not known which tensors are buffers, a checkpoint lists each as both (the same bytes): `load` takes it
   for what the model has.
"""

from __future__ import annotations

import contextlib
import errno
import platform
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from tiered.checkpoint.folder import MANIFEST, Folder
from tiered.checkpoint.manifest import DTYPES, Kind, Lone, Manifest, Part, Stored
from tiered.checkpoint.slices import Entry, Reader, Writer
from tiered.checkpoint.state import Moments, Source, State, a_window
from tiered.errors import StorageError
from tiered.zero.model import STATE_KINDS


@contextlib.contextmanager
def opened(folder: Folder) -> Iterator[State]:
    """The state in a checkpoint, to be read inside. Raises as `Folder.read`; filling raises CorruptDataError."""
    made = folder.read()
    with Reader(folder) as reader:
        weights: dict[str, Source] = {}
        aliases: dict[str, str] = {}
        moments: dict[str, Moments] = {}
        for name, stored in made.parameters.items():
            of = {
                kind: Source(stored.shape, found.dtype, partial(_fill, reader, found.parts))
                for kind, found in stored.kinds.items()
            }
            weights[name] = of["value"]
            aliases |= {alias: name for alias in stored.aliases if alias != name}
            if stored.step and set(STATE_KINDS) <= of.keys():
                moments[name] = Moments(stored.step, of["exp_avg"], of["exp_avg_sq"])
        buffers = {name: made.tensors[number] for name, number in made.buffers.items() if name not in weights}
        for name, lone in buffers.items():
            weights[name] = Source(lone.shape, lone.dtype, partial(_fill_lone, reader, lone.part))
        told = not made.buffers.keys() & made.parameters.keys()  # invariant 3
        groups = made.groups if made.groups is not None or not moments else ()
        yield State(weights, frozenset(buffers) if told else None, aliases, moments, groups)


def _fill(reader: Reader, parts: Sequence[Part], out: torch.Tensor, start: int) -> None:
    for at, values in reader.windows(parts, out.dtype, start, start + out.numel()):
        out[at - start : at - start + values.numel()] = values


def _fill_lone(reader: Reader, part: Part, out: torch.Tensor, start: int) -> None:
    _fill(reader, [part], out.view(torch.uint8), start * out.dtype.itemsize)


def check(folder: Folder, *, force: bool) -> None:
    """Raises StorageError where there is a checkpoint that may not be replaced."""
    if not force and (folder.path / MANIFEST).exists():
        raise StorageError(
            errno.EEXIST,
            "there is a checkpoint: give another folder, or replace it with force (--force)",
            str(folder.path),
        )


def write(folder: Folder, state: State, source: str) -> None:
    """Make `state` the checkpoint of a folder; `source` says where it is from. Raises StorageError."""
    drawn = folder.begin()
    try:
        name, descriptor = folder.file(drawn, 0)
        entries = [(weight, "value", source) for weight, source in state.weights.items()]
        entries += [(weight, kind, each) for weight, m in state.moments.items() for kind, each in m.items()]
        written = {}
        keys = [Entry(f"{weight}:{kind}:0", each.dtype, each.shape) for weight, kind, each in entries]
        window = a_window()
        with Writer(descriptor, folder.path, name, keys) as writer:
            for weight, kind, each in entries:
                written[weight, kind] = Part(writer.write(each.pieces(window)), 0, 0, each.numel)
            size = writer.finish()
        folder.commit(drawn, _manifest(state, written, {name: size}, source))
    except BaseException:
        folder.drop(drawn)
        raise


def _manifest(state: State, written: dict[tuple[str, str], Part], files: dict[str, int], source: str) -> Manifest:
    parameters: dict[str, Stored] = {}
    tensors: list[Lone] = []
    buffers: dict[str, int] = {}
    names: dict[str, list[str]] = {name: [name] for name in state.weights}
    for alias, name in state.aliases.items():
        names[name].append(alias)
    for name, weight in state.weights.items():
        kept = written[name, "value"]
        is_buffer = None if state.buffers is None else name in state.buffers
        if is_buffer is not True and weight.dtype in DTYPES.values():
            kinds = {"value": _kind(weight, kept)}
            moments = state.moments.get(name)
            if moments is not None:
                kinds |= {kind: _kind(each, written[name, kind]) for kind, each in moments.items()}
            parameters[name] = Stored(weight.shape, tuple(names[name]), moments.step if moments else 0, kinds)
        if is_buffer is not False:
            buffers[name] = len(tensors)
            tensors.append(Lone(weight.shape, weight.dtype, Part(kept.span, 0, 0, weight.nbytes)))
    versions = {"python": platform.python_version(), "torch": torch.__version__, "tiered": version("tiered")}
    about: dict[str, Any] = {"versions": versions, "imported_from": source}
    return Manifest(
        step=max((m.step for m in state.moments.values()), default=0),
        ranks=1,
        files=files,
        parameters=parameters,
        groups=None if state.groups is None else [dict(group) for group in state.groups],
        scaler=None,
        extras={},
        tensors=tensors,
        buffers=buffers,
        about=about,
    )


def _kind(source: Source, part: Part) -> Kind:
    return Kind(source.dtype, (part,) if part.start < part.stop else ())
