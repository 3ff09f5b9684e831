"""The manifest of a checkpoint: what it holds, where each byte is, and how to know that the byte is right.

One JSON file beside the data files. Of each parameter it names the kinds of state there are ("value", "exp_avg",
"exp_avg_sq") and, of each kind, the parts that ranks wrote: elements [start, stop), and where they are in a span of a
file, which says how its bytes are checked (see `spans`). So a reader takes any range of any kind from any number of
files, and knows nothing of who wrote them.

    version 2      a span: [file, offset, bytes, check, bytes of a piece, checksums]
                   a part: [number of its span, offset there, start, stop]
    version 1      a part: [file, offset, start, stop, [xxh3 of each 4 MiB, ...]]; it is read as a span of its own

Invariants:
1. `decode` gives a manifest whose every number is in range and whose every file name is a plain name below the
   checkpoint, or raises CorruptDataError: nothing that follows has to doubt it.
2. The parts of a kind cover each element once. Each part lies in one span, and no element in two pieces of it.
3. The file carries a hash of itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tiered.checkpoint.spans import DIGITS, PIECE_BYTES, Span, hash_of
from tiered.errors import CorruptDataError

FORMAT, VERSION = "tiered checkpoint", 2
KINDS = ("value", "exp_avg", "exp_avg_sq")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FILE = re.compile(r"[0-9a-f]{16}/rank-[0-9]{1,6}\.safetensors")
_SUMS = re.compile(r"[0-9a-f]*")
_LARGEST = 1 << 53  # bytes or elements: what JSON carries exactly everywhere


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of one kind of a parameter: bytes of a span, from its byte `at` on."""

    span: Span
    at: int
    start: int
    stop: int

    @property
    def file(self) -> str:
        return self.span.file

    @property
    def offset(self) -> int:
        """In the file."""
        return self.span.offset + self.at


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """One kind of state of a parameter, whole."""

    dtype: torch.dtype
    parts: tuple[Part, ...]  # in order of elements, without gaps


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """One parameter."""

    shape: tuple[int, ...]
    aliases: tuple[str, ...]  # all its names; the first is the one it is stored by
    step: int  # updates taken; without moments 0
    kinds: Mapping[str, Kind]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Lone:
    """A tensor that is no parameter's: a buffer, or what the caller gave."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    part: Part  # in bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """See the file's contract."""

    step: int  # of the optimizer
    ranks: int
    files: Mapping[str, int]  # name -> bytes
    parameters: Mapping[str, Stored]
    groups: Sequence[Mapping[str, Any]] | None  # of the optimizer: hyperparameters, and "params": names
    scaler: Mapping[str, Any] | None  # of the loss
    extras: Mapping[str, Any]  # by rank: what the caller gave, tensors as {"tensor": index of `tensors`}
    tensors: Sequence[Lone]  # of buffers and extras
    buffers: Mapping[str, int]  # name -> index of `tensors`
    about: Mapping[str, Any]  # versions and settings, for people
    calls: tuple[int, int] | None = None  # of the optimizer's step(), and how many of them it skipped; None: `step`, 0


def encode(manifest: Manifest) -> bytes:
    """The manifest as a file."""
    spans: dict[Span, int] = {}

    def out(part: Part) -> tuple[int, ...]:
        return spans.setdefault(part.span, len(spans)), part.at, part.start, part.stop

    fields = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    fields["parameters"] = {name: _stored_out(stored, out) for name, stored in manifest.parameters.items()}
    fields["tensors"] = [(lone.shape, _name(lone.dtype), out(lone.part)) for lone in manifest.tensors]
    fields["spans"] = [dataclasses.astuple(span) for span in spans]
    body = json.dumps({"format": FORMAT, "version": VERSION, **fields}, indent=1)
    return f'{{"xxh3": "{hash_of(body.encode())}", "manifest":\n{body}}}\n'.encode()


def decode(data: bytes, path: str) -> Manifest:
    """Undo `encode`. Raises CorruptDataError naming `path` where it is no manifest, or not a sound one."""
    try:
        outer = json.loads(data, parse_constant=_refuse_constant)
        body = outer["manifest"]
        if body["format"] != FORMAT:
            raise _Unsound("it is not of this format")
        if body["version"] not in (1, VERSION):
            raise _Unsound(f"its version is {body['version']!r}, this package reads 1 and {VERSION}: use a newer one")
        text = data.decode().partition("\n")[2].rpartition("}")[0]
        if hash_of(text.encode()) != outer["xxh3"]:
            raise _Unsound("its bytes are not those that were written")
        return _manifest_in(body)
    except _Unsound as error:
        raise CorruptDataError(0, f"not a sound checkpoint manifest: {error}", path) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptDataError(0, f"not a sound checkpoint manifest: {type(error).__name__}: {error}", path) from None


class _Unsound(Exception):
    """Why a manifest is refused."""


_PartIn = Callable[[Any, torch.dtype], Part]


def _stored_out(stored: Stored, out: Callable[[Part], Any]) -> dict[str, Any]:
    kinds = {
        name: {
            "dtype": _name(kind.dtype),
            "parts": [out(part) for part in kind.parts],
        }
        for name, kind in stored.kinds.items()
    }
    return {"shape": stored.shape, "aliases": stored.aliases, "step": stored.step, "kinds": kinds}


def _manifest_in(body: Mapping[str, Any]) -> Manifest:
    files = {_checked(name, _FILE.fullmatch, "file name"): _count(size) for name, size in body["files"].items()}
    part_in = partial(_first_part_in, files) if body["version"] == 1 else partial(_part_in, _spans_in(body, files))
    tensors = [_lone_in(lone, part_in) for lone in _list(body["tensors"])]
    buffers = {name: _index(index, tensors) for name, index in body["buffers"].items()}
    parameters = {name: _stored_in(name, stored, part_in) for name, stored in body["parameters"].items()}
    groups, scaler = body["groups"], body["scaler"]
    for group in _list(groups) if groups is not None else []:
        if unknown := [name for name in _list(group["params"]) if name not in parameters]:
            raise _Unsound(f"a parameter group names {unknown[0]!r}, of which there is nothing")
    if scaler is not None and not all(isinstance(number, (int, float)) for number in scaler.values()):
        raise _Unsound("its loss scale is no number")
    for extra in body["extras"].values():
        _check_extra(extra, tensors)
    return Manifest(
        step=_count(body["step"]),
        ranks=_count(body["ranks"], least=1),
        files=files,
        parameters=parameters,
        groups=groups,
        scaler=scaler,
        extras=body["extras"],
        tensors=tensors,
        buffers=buffers,
        about=dict(body["about"]),
        calls=_calls_in(body.get("calls")),
    )


def _calls_in(given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    calls, skipped = _list(given)
    return _count(calls), _count(skipped)


def _stored_in(name: str, stored: Mapping[str, Any], part_in: _PartIn) -> Stored:
    shape = tuple(_count(size) for size in _list(stored["shape"]))
    numel = _count(math.prod(shape))
    kinds = {}
    for kind, body in stored["kinds"].items():
        if kind not in KINDS:
            raise _Unsound(f"{name!r} has an unknown kind of state {kind!r}")
        dtype = DTYPES[body["dtype"]]
        parts = tuple(part_in(part, dtype) for part in _list(body["parts"]))
        ends = [0, *(part.stop for part in parts)]
        if [part.start for part in parts] != ends[:-1] or ends[-1] != numel:
            raise _Unsound(f"the parts of {kind} of {name!r} do not cover its {numel} elements once")
        kinds[kind] = Kind(dtype, parts)
    if "value" not in kinds:
        raise _Unsound(f"{name!r} has no value")
    aliases = tuple(_checked(alias, lambda given: isinstance(given, str), "name") for alias in stored["aliases"])
    return Stored(shape, aliases or (name,), _count(stored["step"]), kinds)


def _spans_in(body: Mapping[str, Any], files: Mapping[str, int]) -> list[Span]:
    spans = [_span_in(*given, files=files) for given in _list(body["spans"])]
    by_place = sorted(spans, key=lambda span: (span.file, span.offset, span.nbytes))
    for one, other in itertools.pairwise(by_place):
        if one.file == other.file and one.stop > other.offset:
            raise _Unsound(f"two spans of {one.file!r} overlap at {other.offset}")
    return spans


def _span_in(
    file: str, offset: Any, nbytes: Any, check: str, piece_bytes: Any, sums: str, *, files: Mapping[str, int]
) -> Span:
    if file not in files or _count(offset) + _count(nbytes) > files[file]:
        raise _Unsound(f"bytes {offset} to {offset + nbytes} do not lie inside of {file!r}")
    if check not in DIGITS:
        raise _Unsound(f"it names a check {check!r}, which this package does not know")
    if not 0 < _count(piece_bytes) <= PIECE_BYTES or piece_bytes % 8:
        raise _Unsound(f"a span has pieces of {piece_bytes} bytes")
    span = Span(file, offset, nbytes, check, piece_bytes, _checked(sums, _SUMS.fullmatch, "row of checksums"))
    if len(sums) != span.pieces * DIGITS[check]:
        raise _Unsound(f"{nbytes} bytes at {offset} in {file!r} have {len(sums)} digits of checksums")
    return span


def _part_in(spans: Sequence[Span], given: Any, dtype: torch.dtype) -> Part:
    number, at, start, stop = given
    span = spans[_index(number, spans)]
    nbytes = (_count(stop) - _count(start)) * dtype.itemsize
    if nbytes < 0 or _count(at) + nbytes > span.nbytes or at % dtype.itemsize:
        raise _Unsound(f"elements {start} to {stop} do not lie inside of their span of {span.file!r}")
    return Part(span, at, start, stop)


def _first_part_in(files: Mapping[str, int], given: Any, dtype: torch.dtype) -> Part:
    """A part as version 1 has it: a span of its own."""
    file, offset, start, stop, hashes = given
    nbytes = (_count(stop) - _count(start)) * dtype.itemsize
    if nbytes < 0:
        raise _Unsound(f"elements {start} to {stop} of {file!r} are none")
    span = _span_in(file, offset, nbytes, "xxh3", PIECE_BYTES, "".join(_list(hashes)), files=files)
    return Part(span, 0, start, stop)


def _lone_in(given: Any, part_in: _PartIn) -> Lone:
    shape, name, part = given
    dtype = getattr(torch, _checked(name, re.compile(r"[a-z]+[0-9a-z_]*").fullmatch, "dtype"), None)
    if not isinstance(dtype, torch.dtype):
        raise _Unsound(f"there is no dtype {name!r}")
    sizes = tuple(_count(size) for size in _list(shape))
    made = Lone(sizes, dtype, part_in(part, torch.uint8))
    if (made.part.start, made.part.stop) != (0, _count(math.prod(sizes)) * dtype.itemsize):
        raise _Unsound(f"a tensor of shape {sizes} has {made.part.stop} bytes")
    return made


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_extra(extra: Any, tensors: Sequence[Any]) -> None:
    if isinstance(extra, dict):
        if set(extra) == {"tensor"}:
            _index(extra["tensor"], tensors)
        elif set(extra) == {"float"}:
            float.fromhex(extra["float"])
        else:
            _check_extra(list(extra["dict"].values()), tensors)
    elif isinstance(extra, list):
        for each in extra:
            _check_extra(each, tensors)


def _count(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _LARGEST:
        raise _Unsound(f"{value!r} is no count of bytes or elements")
    return value


def _index(value: Any, of: Sequence[Any]) -> int:
    if _count(value) >= len(of):
        raise _Unsound(f"there is no tensor {value}")
    return int(value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Unsound(f"{value!r} is no list")
    return value


def _checked(value: Any, sound: Callable[[str], object], what: str) -> str:
    if not isinstance(value, str) or not sound(value):
        raise _Unsound(f"{value!r} is no {what}")
    return value


def _refuse_constant(name: str) -> Any:
    raise _Unsound(f"{name} is no number")
