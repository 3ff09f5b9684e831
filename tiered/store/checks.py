"""Checks: the checksums that pieces on drives have, by name, as anybody computes them, whichever engine there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tiered.io.checksum import NAMES, checksum
from tiered.io.engine import Mode


def _digest(mode: Mode, data: memoryview) -> str:
    return digits(checksum(mode)(data, 0))


def digits(crc: int) -> str:
    """A checksum in hexadecimal: 8 digits."""
    return f"{crc:08x}"


CHECKS: Mapping[str, Callable[[memoryview], str]] = {name: partial(_digest, mode) for mode, name in NAMES.items()}
