"""Checksums of pieces, outside of an engine: what either engine wrote, wherever it is read.

`checksum(mode)` gives the function of that engine: (bytes, the checksum so far) -> the checksum with them.
CRC-32C without the extension is computed on many lanes at once, whose results are joined in pairs:

    crc(A B) = shift(crc(A), bytes of B) ^ crc(B)            shift is linear over bits, so it is 32 words

Invariant: both give what the engines do, over any split of the bytes.
"""

from __future__ import annotations

import functools
import types
import zlib
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from tiered.io.engine import Mode, load_native

NAMES: Mapping[Mode, str] = {"native": "crc32c", "portable": "crc32"}
"""What is computed, for who keeps it beyond an engine's life."""
Checksum = Callable[[memoryview, int], int]
_Words = npt.NDArray[np.uint32]
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
_LANE_BITS = 9
_LANE_BYTES = 1 << _LANE_BITS
_ALL = np.uint32(0xFFFFFFFF)


def checksum(mode: Mode) -> Checksum:
    """That of an engine."""
    if mode == "portable":
        return zlib.crc32
    native = load_native()
    return _crc32c if native is None else functools.partial(_native, native)


def _native(native: types.ModuleType, data: memoryview, so_far: int) -> int:
    return int(native.crc32c(np.frombuffer(data, np.uint8).ctypes.data, len(data), so_far))


def _crc32c(data: memoryview, so_far: int) -> int:
    given = np.frombuffer(data, np.uint8)
    lanes = len(given) // _LANE_BYTES
    whole, rest = np.split(given, [lanes * _LANE_BYTES])
    columns = np.ascontiguousarray(whole.reshape(lanes, _LANE_BYTES).T)
    found = _joined(_over(columns, lanes))
    for part, crc in ((whole, found), (rest, int(_over(rest.reshape(-1, 1), 1)[0]))):
        so_far = _shifted(so_far, len(part)) ^ crc
    return so_far


def _over(columns: npt.NDArray[np.uint8], lanes: int) -> _Words:
    """The checksum of each lane; a column has one byte of each."""
    state = np.full(lanes, _ALL, np.uint32)
    for column in columns:
        state = _table()[(state ^ column) & 0xFF] ^ (state >> np.uint32(8))
    state ^= _ALL
    return state


def _joined(lanes: _Words) -> int:
    """The checksum of lanes one after the other."""
    if not len(lanes):
        return 0
    depth = (len(lanes) - 1).bit_length()
    words = np.zeros(1 << depth, np.uint32)  # lanes of no bytes come first, and change nothing
    words[len(words) - len(lanes) :] = lanes
    for level in range(depth):
        words = _applied(_shift(_LANE_BITS + level), words[::2]) ^ words[1::2]
    return int(words[0])


def _shifted(crc: int, nbytes: int) -> int:
    words = np.array([crc], np.uint32)
    for power in range(nbytes.bit_length()):
        if nbytes >> power & 1:
            words = _applied(_shift(power), words)
    return int(words[0])


@functools.cache
def _shift(power: int) -> _Words:
    """What 2**power bytes after it make of each bit of a checksum: (32,)."""
    if power == 0:
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        first: _Words = _table()[bits & 0xFF] ^ (bits >> np.uint32(8))
        return first
    half = _shift(power - 1)
    return _applied(half, half)


def _applied(images: _Words, words: _Words) -> _Words:
    made = np.zeros_like(words)
    for bit, image in enumerate(images):
        made ^= (words >> np.uint32(bit) & np.uint32(1)) * image
    return made


@functools.cache
def _table() -> _Words:
    words = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        words = (words >> np.uint32(1)) ^ (words & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return words
