"""Training bytes: which files make up the text, and which window of it each batch takes.

Owns the list of files and their sizes; keeps none open and none in memory, so a corpus may be larger than RAM.

1. The files count as one long text in the order given; `window` reads across their seams.
2. A batch is a pure function of (corpus, seed, index): two runs with one seed see the same bytes, and the rows that
   ranks take of it are those that one rank would take alone.
3. A file that is missing, empty, no regular file or changed in size is an error that names it.
"""

import bisect
import os
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from tiered.errors import ConfigError, StorageError

LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
"""Folders of the standard library that differ between installations of one Python version."""


class Corpus:
    """Some files read as one text of bytes."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self._ends = tuple(accumulate(_size(path) for path in self._files))  # where each file ends in the text

    @classmethod
    def standard_library(cls) -> "Corpus":
        """The sources of the running Python's standard library, by path. Raises ConfigError where there are none."""
        root = Path(sysconfig.get_path("stdlib"))
        named = sorted((path.relative_to(root).as_posix(), path) for path in _sources(root))
        if not named:
            raise ConfigError(
                f"no *.py files under {root}: this Python has no library sources; name text files instead"
            )
        return cls(path for _, path in named)

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self._files)

    @property
    def nbytes(self) -> int:
        """Length of the whole text in bytes."""
        return self._ends[-1] if self._ends else 0

    def require(self, window: int) -> None:
        """Raises ConfigError unless the text holds at least one window of that many bytes."""
        if self.nbytes < window:
            raise ConfigError(f"text: got {self.nbytes} bytes in all, expected at least {window} (context + 1)")

    def window(self, start: int, nbytes: int) -> bytes:
        """The bytes [start, start + nbytes) of the text. Raises StorageError where a file no longer has them."""
        parts: list[bytes] = []
        index = bisect.bisect_right(self._ends, start)
        while nbytes:
            begin = self._ends[index - 1] if index else 0
            part = _read(self._files[index], start - begin, min(nbytes, self._ends[index] - start))
            parts.append(part)
            start, nbytes, index = start + len(part), nbytes - len(part), index + 1
        return b"".join(parts)

    def batch(self, rows: range, *, batch: int, context: int, seed: int, index: int) -> tuple[Tensor, Tensor]:
        """Rows of batch number `index`, which has `batch` of them: inputs and targets, each int64 (rows, context).

        A target is the next byte. Only the rows asked for are read.
        """
        # Seeded by text, of which all of it counts; torch's generator looks at the low 32 bits of its seed alone.
        random = Random(f"batch {index} of seed {seed}")
        starts = [random.randrange(self.nbytes - context) for _ in range(batch)]
        read = bytearray().join(self.window(starts[row], context + 1) for row in rows)
        text = torch.frombuffer(read, dtype=torch.uint8).view(len(rows), context + 1).long()
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _sources(root: Path) -> Iterator[Path]:
    """Non-empty *.py files below `root`, without walking through the folders left out (site-packages may be huge)."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for name in files:
            path = Path(folder, name)
            if path.suffix == ".py" and path.is_file() and path.stat().st_size:
                yield path


def _size(path: Path) -> int:
    if not path.exists():
        raise ConfigError(f"{path}: no such file; expected a text file")
    if not path.is_file():
        raise ConfigError(f"{path}: not a regular file; expected a text file")
    size = path.stat().st_size
    if not size:
        raise ConfigError(f"{path}: is empty; expected a text file with at least one byte")
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a readable text file") from error
    return size


def _read(path: Path, offset: int, nbytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            part = file.read(nbytes)
    except OSError as error:
        raise StorageError(error.errno, f"{path}: cannot be read any more ({error.strerror})") from error
    if len(part) < nbytes:
        raise StorageError(f"{path}: got {len(part)} bytes at {offset}, expected {nbytes}; it shrank during training")
    return part
