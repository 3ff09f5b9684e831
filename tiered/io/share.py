"""Sharing blocks between files: the bytes of one become another's without being moved.

A file system that can (XFS, btrfs) lets two files have the same blocks, and gives whichever is written to a block of
its own then. So neither changes by what is written to the other, and such a write may find the drive full, although its
range was preallocated.

Invariant: where sharing is refused nothing is an error, and the target's range is undefined; what fails for another
reason (no space, a drive's error) raises.
"""

from __future__ import annotations

import errno
import fcntl
import struct
from collections.abc import Iterator, Sequence

from tiered.io.drive import BLOCK
from tiered.io.engine import Piece

_FICLONERANGE = 0x4020940D
_REFUSED = {
    errno.EXDEV,  # another file system
    errno.EOPNOTSUPP,  # one that cannot, or a kernel
    errno.ENOTTY,
    errno.ENOSYS,
    errno.EINVAL,  # its blocks are larger, or the two files are kept in different ways
    errno.EPERM,  # a file that may not change, or a sandbox
    errno.EACCES,
    errno.ETXTBSY,
}


def share(source: int, pieces: Sequence[Piece], target: int, offset: int) -> bool:
    """Let the file `target` have each piece of the file `source` at `offset` + its address, in whole blocks. False
    where the file system refuses one. Raises OSError."""
    try:
        for start, nbytes, at in _runs(pieces):
            _share(source, start, nbytes, target, offset + at)
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        raise
    return True


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[int, int, int]]:
    """Pieces that lie one after the other, there as here, are one run: its start there, bytes, and start here."""
    start = nbytes = at = 0
    for piece in pieces:
        if nbytes and (piece.offset, piece.address) == (start + nbytes, at + nbytes):
            nbytes += piece.nbytes
            continue
        if nbytes:
            yield start, nbytes, at
        start, nbytes, at = piece.offset, piece.nbytes, piece.address
    if nbytes:
        yield start, -(-nbytes // BLOCK) * BLOCK, at


def _share(source: int, start: int, nbytes: int, target: int, offset: int) -> None:
    """The one system call. Raises OSError."""
    fcntl.ioctl(target, _FICLONERANGE, struct.pack("qQQQ", source, start, nbytes, offset))
