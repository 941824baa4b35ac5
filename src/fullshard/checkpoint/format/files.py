"""File operations of checkpoints, on a local folder or behind a URL.

They use torch's file systems: the local one, or for URLs (with ``://``) the one on fsspec. Added here are flushing to
disk and errors with the path of the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from fullshard.errors import CheckpointError

__all__ = ["FileVersion", "Folder", "flush", "looks"]

_LARGEST_INDEX = 1 << 31  # bytes
_LOOKS, _LOOK_S = 5, 0.2
_LOST_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


FileVersion = tuple[int, ...]  # device, inode, size and times of a file


class Folder:
    """A flat folder of files, without subfolders.

    Args:
        path: Local path, or URL with ``://`` (needs fsspec, and what it needs for that kind of URL).

    Raises:
        CheckpointError: If URLs of that protocol cannot be opened.
        ValueError: If the path is empty, or a URL that pathlib has changed.

    Attributes:
        path: The path, for messages.
        is_local: True for a path of the local file system.
    """

    path: str
    is_local: bool
    _files: Any  # torch's FileSystemBase; Any: its own annotations do not have `ls`

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if not self.path:
            raise ValueError("the path of the checkpoint is empty; pass a folder or URL")
        if _LOST_SLASH.match(self.path):
            raise ValueError(f"{self.path}: pathlib removed a slash from this URL; pass it as str")
        self.is_local = "://" not in self.path
        if self.is_local:
            self.path = os.path.expanduser(self.path)
        self._files = FileSystem() if self.is_local else _fsspec_files(self.path)
        self.path = str(self._files.init_path(self.path))

    def where(self, name: str) -> str:
        """Return the full name of a file in the folder, for messages."""
        return os.path.join(self.path, name) if name else self.path

    def create(self) -> None:
        """Create the folder and its parents unless they exist."""
        with self._errors_with_path("be made", ""):
            made = [] if not self.is_local else [above for above in Path(self.path).parents if not above.exists()]
            new = self.is_local and not Path(self.path).exists()
            self._files.mkdir(self.path)
            # A new folder can be lost in a power failure until its parent has been flushed.
            for folder in [Path(self.path), *made] if new else ():
                flush(folder.parent)

    def exists(self, name: str) -> bool:
        """Return True if the file exists."""
        return bool(self._files.exists(self._full(name)))

    def names(self) -> list[str]:
        """Return the names of all files in the folder; empty if the folder does not exist."""
        if not self._files.exists(self.path):
            return []
        with self._errors_with_path("be listed", ""):
            entries = self._files.ls(self.path)
        return sorted(entry.rstrip("/").replace(os.sep, "/").rsplit("/", 1)[-1] for entry in entries)

    def length(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            CheckpointError: If there is no such file.
        """
        with self._errors_with_path("be read", name):
            if self.is_local:
                return os.stat(self._full(name)).st_size
            return int(self._files.fs.size(self._full(name)))

    def version(self, name: str) -> FileVersion | None:
        """Return a value that changes whenever the file's contents do; None where that cannot be known, as behind a
        URL.
        """
        if not self.is_local:
            return None
        with self._errors_with_path("be read", name):
            found = os.stat(self._full(name))
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    @contextlib.contextmanager
    def read(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file for reading. A local one must be a regular file: others may block, or never end."""
        if self.is_local and self.exists(name) and not os.path.isfile(self._full(name)):
            raise CheckpointError(f"{self.where(name)} cannot be read: expected a regular file, found another kind")
        with self._errors_with_path("be read", name), self._files.create_stream(self._full(name), "rb") as stream:
            yield cast(IO[bytes], stream)

    def read_index(self, name: str) -> bytes:
        """Return the contents of an index, which is read as a whole.

        Raises:
            CheckpointError: If it cannot be read, or is larger than any index.
        """
        with self.read(name) as stream:
            if self.length(name) > _LARGEST_INDEX:
                raise CheckpointError(
                    f"{self.where(name)} has {self.length(name)} bytes, expected an index of at most {_LARGEST_INDEX}: "
                    "use another checkpoint"
                )
            return stream.read()

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        """Create a file and open it for writing; it is flushed to disk before the block ends. A URL's file system
        decides by itself.
        """
        with self._errors_with_path("be written", name), self._files.create_stream(self._full(name), "wb") as stream:
            yield cast(IO[bytes], stream)
            if self.is_local:
                stream.flush()
                os.fsync(stream.fileno())

    def replace(self, name: str, by: str) -> None:
        """Rename file ``by`` to ``name`` atomically, replacing an existing file of that name."""
        with self._errors_with_path("be written", name):
            self._files.rename(self._full(by), self._full(name))

    def remove(self, name: str) -> None:
        """Remove a file."""
        with self._errors_with_path("be removed", name):
            self._files.rm_file(self._full(name))

    def sync(self) -> None:
        """Flush directory entries to disk: without it, a new file may be lost in a power failure."""
        if self.is_local:
            with self._errors_with_path("be written", ""):
                flush(Path(self.path))

    def _full(self, name: str) -> Any:
        return self._files.concat_path(self.path, name)

    @contextlib.contextmanager
    def _errors_with_path(self, done: str, name: str) -> Iterator[None]:
        """Translate errors of the file system into CheckpointError with the path of the file."""
        try:
            yield
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.where(name)} cannot {done}: no such file. If the checkpoint was copied, copy all its files; "
                "if ranks are on several machines, the folder must be on a shared file system"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{self.where(name)} cannot {done}: {error.strerror or error}") from error
        except (CheckpointError, TypeError, ValueError):
            raise
        except Exception as error:  # fsspec may raise anything, also what other ranks cannot unpickle
            raise CheckpointError(f"{self.where(name)} cannot {done}: {type(error).__name__}: {error}") from None


def looks() -> Iterator[int]:
    """Yield a few times, with pauses, to look for a file: a network file system may show it late."""
    for look in range(_LOOKS):
        time.sleep(_LOOK_S if look else 0)
        yield look


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    if os.name == "nt":  # Windows cannot open folders, and writes names through
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsspec_files(path: str) -> Any:
    """Return torch's file system on fsspec. Imported only here: most folders are local, and fsspec is optional."""
    try:
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFiles
    except ImportError as error:
        raise CheckpointError(f"{path} is a URL, which requires fsspec: pip install fsspec") from error
    files = FsspecFiles()
    try:
        files.init_path(path)
    except (ImportError, ValueError) as error:  # unknown protocol, or its package is missing
        raise CheckpointError(f"{path} cannot be opened: {error}") from error
    return files
