"""Checksums outside of an engine are those that the engines write, with the extension and without."""

import zlib

import numpy as np
import pytest

from tiered.io.checksum import checksum

SIZES = (0, 1, 511, 512, 513, 4096, 5000, 9 * 512, (1 << 20) + 77)


def noise(nbytes: int) -> memoryview:
    return memoryview(np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes())


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_portable_engine_has_zlibs(nbytes: int) -> None:
    assert checksum("portable")(noise(nbytes), 0) == zlib.crc32(noise(nbytes))


def test_castagnolis_is_the_standard_one_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERED_PORTABLE", "1")
    crc = checksum("native")
    assert crc(memoryview(b"123456789"), 0) == 0xE3069283  # RFC 3720's own check
    assert crc(memoryview(bytes(32)), 0) == 0x8A9136AA


@pytest.mark.native
@pytest.mark.parametrize("nbytes", SIZES)
def test_it_is_the_same_with_the_extension_and_over_any_split(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    native = checksum("native")
    monkeypatch.setenv("TIERED_PORTABLE", "1")
    crc = checksum("native")
    data = noise(nbytes)
    assert crc(data, 0) == native(data, 0)
    for cut in (0, 3, nbytes // 2):
        assert crc(data[cut:], crc(data[:cut], 0)) == native(data, 0)
        assert native(data[cut:], crc(data[:cut], 0)) == native(data, 0)
