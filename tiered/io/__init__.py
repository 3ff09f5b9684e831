"""Bytes in swap files: extents striped over drives, asynchronous reads and writes, a checksum for every piece.

    swapfile    SwapSpace: what the store uses
    extent      what it allocates: pieces, and where they lie
    weights     which share of the pieces each drive has
    probe       how fast drives are beside each other
    room        which drives a new extent lies on, and how much there is
    transfer    what its reads and writes return: tickets
    totals      what a space has moved on each drive
    share       how another file comes to have an extent's bytes without a copy
    drive       one drive's file: descriptors, direct I/O, which byte ranges are free
    directory   who owns a swap directory, and what a dead owner left behind
    owner       which process that is, and whether it lives
    look        what is in such directories, for who only looks
    checksum    checksums of pieces, outside of an engine
    resources   what a space holds of the system, and how it is given back
    patience    what is done about a drive that is late, and what is said of one that fails
    engine      the interface of an I/O engine, the native one, and the choice between the two
    portable    the same interface on aiofiles, where the extension is missing
    attempts    what it has queued and under way

Knows addresses and byte counts; what they mean is the business of whoever allocated them.
"""

from tiered.io.swapfile import Extent, SwapSpace, SwapStats, Ticket

__all__ = ["Extent", "SwapSpace", "SwapStats", "Ticket"]
