"""The folder of a checkpoint, on this machine or behind a URL: the only file operations that checkpoints are made of.

torch's file systems do the work: the local one, or, for anything with ``://`` in it, the one on fsspec. What they do
not do is done here: data reach the disk before they count, and errors say which file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from fullshard.errors import CheckpointError

__all__ = ["FileVersion", "Folder"]

_LOST_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


@dataclass(frozen=True)
class FileVersion:
    """Which file it is, and when it was changed last; fields as in ``os.stat_result``."""

    device: int
    inode: int
    length: int
    modified_ns: int
    changed_ns: int


class Folder:
    """One folder with files in it, no folders below.

    Args:
        path: Local path, or URL with ``://`` (needs fsspec, and what it needs for that kind of URL).

    Raises:
        CheckpointError: If that kind of URL cannot be opened here.
        ValueError: If the path is empty, or a URL that pathlib has changed.

    Attributes:
        path: As it was given, for messages.
        is_local: Whether it is a path of this machine's file system.
    """

    path: str
    is_local: bool
    _files: Any  # torch's FileSystemBase; Any: its own annotations do not have `ls`

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if not self.path:
            raise ValueError("a checkpoint needs a folder: the path is empty")
        if _LOST_SLASH.match(self.path):
            raise ValueError(f"{self.path}: pathlib has taken a slash of this URL away; pass it as text")
        self.is_local = "://" not in self.path
        if self.is_local:
            self.path = os.path.expanduser(self.path)
        self._files = FileSystem() if self.is_local else _fsspec_files(self.path)
        self.path = str(self._files.init_path(self.path))

    def where(self, name: str) -> str:
        """The full name of a file in it, for messages."""
        return os.path.join(self.path, name) if name else self.path

    def create(self) -> None:
        """Make the folder, and those above it, unless it is there."""
        with self._explained("be made", ""):
            made = [] if not self.is_local else [above for above in Path(self.path).parents if not above.exists()]
            new = self.is_local and not Path(self.path).exists()
            self._files.mkdir(self.path)
            # A folder that was made can be lost with the power until the one that it is in has reached the disk.
            for folder in [Path(self.path), *made] if new else ():
                _sync_folder(folder.parent)

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return bool(self._files.exists(self._full(name)))

    def names(self) -> list[str]:
        """Names of the files in it; empty if there is no such folder."""
        if not self._files.exists(self.path):
            return []
        with self._explained("be listed", ""):
            entries = self._files.ls(self.path)
        return sorted(entry.rstrip("/").replace(os.sep, "/").rsplit("/", 1)[-1] for entry in entries)

    def length(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            CheckpointError: If there is no such file.
        """
        with self._explained("be read", name):
            if self.is_local:
                return os.stat(self._full(name)).st_size
            return int(self._files.fs.size(self._full(name)))

    def version(self, name: str) -> FileVersion | None:
        """Differs whenever a file's contents do; None if that cannot be known, as behind a URL."""
        if not self.is_local:
            return None
        with self._explained("be read", name):
            found = os.stat(self._full(name))
        return FileVersion(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @contextlib.contextmanager
    def read(self, name: str) -> Iterator[IO[bytes]]:
        """A file, open for reading."""
        with self._explained("be read", name), self._files.create_stream(self._full(name), "rb") as stream:
            yield cast(IO[bytes], stream)

    @contextlib.contextmanager
    def write(self, name: str, *, sync: bool) -> Iterator[IO[bytes]]:
        """A new file, open for writing.

        Args:
            name: Of the file.
            sync: Whether leaving the block waits until it has reached the disk. A URL's file system decides by itself.
        """
        with self._explained("be written", name), self._files.create_stream(self._full(name), "wb") as stream:
            yield cast(IO[bytes], stream)
            if sync and self.is_local:
                stream.flush()
                os.fsync(stream.fileno())

    def replace(self, name: str, by: str) -> None:
        """Give file ``by`` the name ``name``, in one step; what had that name is gone."""
        with self._explained("be written", name):
            self._files.rename(self._full(by), self._full(name))

    def remove(self, name: str) -> None:
        """Remove a file."""
        with self._explained("be removed", name):
            self._files.rm_file(self._full(name))

    def sync(self) -> None:
        """Wait until names of files have reached the disk: without it, a new file may be lost with the power."""
        if self.is_local:
            with self._explained("be written", ""):
                _sync_folder(Path(self.path))

    def _full(self, name: str) -> Any:
        return self._files.concat_path(self.path, name)

    @contextlib.contextmanager
    def _explained(self, done: str, name: str) -> Iterator[None]:
        """What the file system raises, as an error that says which file it was."""
        try:
            yield
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.where(name)} cannot {done}: there is no such file. If the checkpoint was copied, copy all its "
                "files; if ranks are on several machines, all of them have to see the same folder"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{self.where(name)} cannot {done}: {error.strerror or error}") from error
        except (CheckpointError, TypeError, ValueError):
            raise
        except Exception as error:  # a URL's file system may raise anything, also what other ranks cannot unpickle
            raise CheckpointError(f"{self.where(name)} cannot {done}: {type(error).__name__}: {error}") from None


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # Windows cannot open folders, and writes names through
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsspec_files(path: str) -> Any:
    """torch's file system on fsspec. Imported only here: most folders are local, and fsspec is optional."""
    try:
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFiles
    except ImportError as error:
        raise CheckpointError(f"{path} is a URL, and URLs are opened with fsspec: pip install fsspec") from error
    files = FsspecFiles()
    try:
        files.init_path(path)
    except (ImportError, ValueError) as error:  # an unknown protocol, or one whose package is missing
        raise CheckpointError(f"{path} cannot be opened: {error}") from error
    return files
