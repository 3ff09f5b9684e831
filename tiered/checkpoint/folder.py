"""A folder of checkpoint files: which of them count, and how a new set replaces the old one at one instant.

    <path>/
      manifest.json              what counts; replaced by renaming
      <id>/rank-<r>.safetensors  the data of one save; `id` is drawn anew for each
      <id>/rank-<r>.json         while it is made in the background: see `sidecar`

    begin -> <id>/ exists -> ranks write -> commit: manifest.json.new is flushed, then renamed -> older ids are removed

Invariants:
1. Killed at any instant, the folder holds the checkpoint it held before, or the new one, whole.
2. Whatever no manifest names is refused as a checkpoint, and removed by the next save there.
3. No link is followed below `path`; nothing outside of it is touched, and nothing in it that is not of this layout.
4. Files are flushed to the drive before the manifest that names them is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from tiered.checkpoint import manifest
from tiered.checkpoint.manifest import Manifest
from tiered.errors import CorruptDataError, StorageError

MANIFEST = "manifest.json"
NEW = "manifest.json.new"
ID = re.compile(r"[0-9a-f]{16}")
DATA = re.compile(r"rank-[0-9]{1,6}\.(safetensors|json|json\.new)")
STEP = re.compile(r"step-[0-9]{9,}")
OTHER = re.compile(r"\.safetensors(\.index\.json)?$|^\.metadata$")  # beside no manifest
LARGEST_MANIFEST = 1 << 30  # bytes


class Folder:
    """See the file's contract."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.fspath(path)))

    # --- writing ---

    def begin(self) -> str:
        """Make place for the data of a new save; returns its id. Raises StorageError."""
        with self.named("a checkpoint cannot be made there"):
            self.path.mkdir(parents=True, exist_ok=True)
            _own(self.path)
            unknown = [entry.name for entry in listed(self.path) if not ours(entry)]
            if unknown:
                raise StorageError(
                    errno.EEXIST,
                    f"the folder holds {unknown[0]!r}, which is no part of a checkpoint: give a folder of its own",
                    str(self.path),
                )
            drawn = secrets.token_hex(8)
            (self.path / drawn).mkdir(mode=0o700)
            return drawn

    def file(self, drawn: str, rank: int) -> tuple[str, int]:
        """Make the data file of one rank: its name in the manifest, and a descriptor open for writing."""
        name = f"{drawn}/rank-{rank}.safetensors"
        with self.named("a data file cannot be made there"):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return name, os.open(self.path / name, flags, 0o600)

    def commit(self, drawn: str, made: Manifest) -> None:
        """From now on the data of `drawn` is the checkpoint. Raises StorageError; then the old one still is."""
        data = manifest.encode(made)
        with self.named("the manifest cannot be written"):
            flush_folder(self.path / drawn)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / NEW)
            descriptor = os.open(self.path / NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as out:
                    out.write(data)
                    out.flush()
                    os.fsync(out.fileno())
                os.rename(self.path / NEW, self.path / MANIFEST)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(self.path / NEW)
                raise
            flush_folder(self.path)
        self.sweep(keep=drawn)

    def sweep(self, keep: str) -> None:
        """Remove the data of every other save. What cannot be removed now is by a later one."""
        with contextlib.suppress(OSError):
            for entry in listed(self.path):
                if ID.fullmatch(entry.name) and entry.name != keep and entry.is_dir(follow_symlinks=False):
                    self.drop(entry.name)

    def drop(self, drawn: str) -> None:
        """Remove the data of one save, that of every rank before what they say of it; unless it is the checkpoint.

        Several ranks may do so at once: what another has removed meanwhile ends nobody's part of it."""
        with contextlib.suppress(OSError):
            if self._committed(drawn):  # and what failed came after
                return
            for _ in range(2):  # a rank that has not seen the first may have put something there meanwhile
                for entry in sorted(listed(self.path / drawn), key=lambda entry: "safetensors" not in entry.name):
                    if DATA.fullmatch(entry.name):
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(entry.path)
            os.rmdir(self.path / drawn)

    def remove(self) -> None:
        """Remove a whole checkpoint, and its folder where nothing else is in it."""
        with contextlib.suppress(OSError):
            os.unlink(self.path / MANIFEST)
            self.sweep(keep="")
            os.rmdir(self.path)

    # --- reading ---

    def read(self) -> Manifest:
        """The checkpoint's manifest, with every file it names there in its size. Raises StorageError where there is no
        checkpoint, CorruptDataError where it is not sound."""
        made = self.manifest()
        for name, size in made.files.items():
            if (there := self.size(name)) != size:
                raise CorruptDataError(0, f"the data file has {there} bytes, expected {size}", str(self.path / name))
        return made

    def manifest(self, largest: int = LARGEST_MANIFEST) -> Manifest:
        """The manifest alone, of at most so many bytes. Raises as `read`."""
        path = self.path / MANIFEST
        with self.named("no whole checkpoint can be read there"):
            _own(self.path)
            others = [name for name in os.listdir(self.path) if OTHER.search(name)]
            if others and not path.exists():
                raise StorageError(
                    errno.EINVAL,
                    f"the folder has {others[0]!r} and no manifest, as other programs save: make a checkpoint of it "
                    f"with tiered.import_checkpoint, or tiered import",
                    str(self.path),
                )
            with open(path, "rb", opener=_opener) as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise StorageError(errno.EINVAL, "the manifest is no regular file", str(path))
                if about.st_size > largest:
                    says = f"not a sound checkpoint manifest: it has {about.st_size} bytes, at most {largest} are read"
                    raise CorruptDataError(0, says, str(path))
                data = file.read(about.st_size)
        return manifest.decode(data, str(path))

    def size(self, name: str) -> int:
        """Bytes of a data file. Raises StorageError."""
        descriptor = self.open(name)
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def open(self, name: str) -> int:
        """A descriptor of a data file, for reading. Raises StorageError."""
        path = self.path / name
        with self.named("the data file cannot be opened"):
            if path.parent.is_symlink():
                raise StorageError(errno.ELOOP, "a link is not followed", str(path.parent))
            descriptor = _opener(str(path), os.O_RDONLY)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise StorageError(errno.EINVAL, "the data file is no regular file", str(path))
        return descriptor

    def _committed(self, drawn: str) -> bool:
        """The manifest names the data of `drawn`, sound or not."""
        with contextlib.suppress(FileNotFoundError), open(self.path / MANIFEST, "rb", opener=_opener) as file:
            return f'"{drawn}/'.encode() in file.read(LARGEST_MANIFEST)
        return False

    @contextlib.contextmanager
    def named(self, what: str) -> Iterator[None]:
        """What the system says, with the path in it."""
        try:
            yield
        except StorageError:
            raise
        except FileNotFoundError as error:
            raise StorageError(errno.ENOENT, f"{what}: it does not exist", error.filename or str(self.path)) from error
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise StorageError(error.errno or 0, f"{what}: {reason}", error.filename or str(self.path)) from error


def newest_first(parent: Path) -> list[Path]:
    """The checkpoints that `save(keep=...)` has made in a folder, the one committed last first; those never committed
    are the last."""
    found = []
    with contextlib.suppress(OSError):
        for entry in listed(parent):
            if STEP.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                try:
                    committed = os.lstat(Path(entry.path) / MANIFEST).st_mtime_ns
                except OSError:
                    committed = -1
                found.append((committed, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]


def find(path: str | os.PathLike[str]) -> Folder:
    """The folder of the checkpoint that `path` means: itself or, where it holds several, the one committed last."""
    given = Path(os.path.abspath(os.fspath(path)))
    if not (given / MANIFEST).exists():
        for newest in newest_first(given)[:1]:
            if (newest / MANIFEST).exists():
                return Folder(newest)
    return Folder(given)


def listed(path: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """What is in a folder now. Raises OSError."""
    with os.scandir(path) as entries:  # closed, whatever is raised on the way
        return list(entries)


def flush_folder(path: Path) -> None:
    """Bring the names in a folder to the drive."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def _own(path: Path) -> None:
    """Raises StorageError for a folder that is a link, or that another user could change while it is used."""
    about = os.lstat(path)
    if stat.S_ISLNK(about.st_mode):
        raise StorageError(errno.ELOOP, "the checkpoint folder is a link, which is not followed", str(path))
    if not stat.S_ISDIR(about.st_mode):
        raise StorageError(errno.ENOTDIR, "the checkpoint is a file, expected a folder", str(path))
    if about.st_uid not in (os.geteuid(), 0) or about.st_mode & stat.S_IWOTH:
        whose = "is writable by everybody" if about.st_mode & stat.S_IWOTH else f"belongs to user {about.st_uid}"
        raise StorageError(
            errno.EPERM, f"the checkpoint folder {whose}: copy it to a folder of your own, or chmod o-w it", str(path)
        )


def ours(entry: os.DirEntry[str]) -> bool:
    """What is in a checkpoint's folder is of its layout."""
    if entry.name in (MANIFEST, NEW):
        return entry.is_file(follow_symlinks=False)
    return bool(ID.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
