"""Every error this package raises on purpose, as one small tree.

    TieredError
    |-- ConfigError (also ValueError)      a setting is unknown or impossible
    |-- BudgetError (also MemoryError)     a hard memory budget would be exceeded
    |-- UsageError (also RuntimeError)     a call that is wrong at this moment, or unsupported by name
    |-- RankError (also RuntimeError)      the ranks of a run disagree, or one of them is gone
    `-- StorageError (also OSError)        a drive, a file or its contents
        |-- SwapDirectoryError             missing, not writable, owned by a live run, a link
        |-- SwapFullError                  no space for the swap file, found when it is preallocated
        `-- CorruptDataError               bytes read differ from the bytes written

Each message names the parameter or path, what was got, what was expected and what to do. The built-in base lets
generic code (`except ValueError`, `except OSError`) keep working.
"""


class TieredError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(TieredError, ValueError):
    """A setting is unknown or impossible; the message names the field, its value and what would work."""


class BudgetError(TieredError, MemoryError):
    """A hard budget would be exceeded; the message names the budget, its size and the bytes needed."""


class UsageError(TieredError, RuntimeError):
    """The call is wrong at this moment or not supported; the message names the call that works instead."""


class RankError(TieredError, RuntimeError):
    """The ranks of a run disagree, or one is gone; the message says which rank was doing what."""


class StorageError(TieredError, OSError):
    """A drive or file failed; carries errno and filename where the system gave them."""


class SwapDirectoryError(StorageError):
    """The swap directory is missing, not writable, not a real directory, or in use by a live process."""


class SwapFullError(StorageError):
    """The drive has no room for the swap file; nothing was written."""


class CorruptDataError(StorageError):
    """Bytes read back differ from the bytes written; names the file and the byte offset."""
