"""A data set's files, read where they lie: plain, gzipped, in a folder or inside a zip.

Nothing is ever extracted, so no name in an archive can reach the file system, and no more is read than
a limit that goes with the stored size, so no archive can be a bomb.
"""

import gzip
import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from replay.datasets.base import DatasetError

# Ratings shrink by 4 to 8 times, so a file that grows by more than this is no data set.
MAX_EXPANSION = 100
_SMALL_BYTES = 1 << 20  # so small that its expansion does not matter
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class _Bounded(io.RawIOBase):
    """A binary stream that ends in an error after `limit` bytes."""

    def __init__(self, raw: BinaryIO, limit: int, label: str) -> None:
        self._raw = raw
        self._left = limit
        self._label = label

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._raw.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise DatasetError(f"{self._label}: unpacks to more than {MAX_EXPANSION} times its size; not a data set")
        buffer[: len(data)] = data
        return len(data)


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, wherever it lies."""

    label: str  # for messages: path, or archive/member
    stored_bytes: int  # as it lies there, compressed or not
    _open: Callable[[], BinaryIO]

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Its bytes, unpacked; DatasetError for whatever is wrong with the file while it is open."""
        limit = max(_SMALL_BYTES, self.stored_bytes * MAX_EXPANSION)
        try:
            with closing(self._open()) as raw, io.BufferedReader(_Bounded(raw, limit, self.label)) as data:
                if data.peek(len(_LFS_POINTER)).startswith(_LFS_POINTER):
                    raise DatasetError(
                        f"{self.label}, line 1: a Git LFS pointer, not the data: fetch it with `git lfs pull`"
                    )
                yield data
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DatasetError(f"{self.label}: damaged or cut short ({error})") from error
        except (OSError, RuntimeError, NotImplementedError) as error:
            # a zip with a password or an unknown method raises the latter two
            raise DatasetError(f"{self.label}: cannot be read ({error})") from error

    def first_line(self) -> str:
        """Its first line, without a byte order mark and line end; only for recognising the format."""
        with self.open() as data:
            return decode(data.readline(_SMALL_BYTES)).rstrip("\r\n")

    def text(self) -> str:
        """All of it as text with `\\n` line ends."""
        with self.open() as data:
            return decode(data.read()).replace("\r\n", "\n")


def decode(data: bytes) -> str:
    """UTF-8 with or without a byte order mark; Latin-1, as old MovieLens files are, if it is not that."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def data_files(path: Path) -> dict[str, DataFile]:
    """The files of a zip, of a folder and its folders, or the one file itself, by name without `.gz`."""
    if not path.exists():
        raise DatasetError(f"{path}: no such file or folder")
    if path.is_dir():
        found = sorted(file for pattern in ("*/*", "*") for file in path.glob(pattern) if file.is_file())
        found.sort(key=lambda file: -len(file.parts))  # the shallowest wins
        return {_name(file): plain_file(file) for file in found}
    if zipfile.is_zipfile(path) or path.suffix in (".zip", ".whl"):
        return _zip_members(path)
    return {_name(path): plain_file(path)}


def _name(path: Path) -> str:
    return path.stem if path.suffix == ".gz" else path.name


def plain_file(path: Path) -> DataFile:
    """A file that lies on its own, gzipped or not."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from error

    def unpacked() -> BinaryIO:
        raw = path.open("rb")
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        return gzip.GzipFile(fileobj=raw) if zipped else raw  # type: ignore[return-value]

    return DataFile(str(path), size, unpacked)


def _zip_members(path: Path) -> dict[str, DataFile]:
    with plain_file(path).open():
        pass  # a pointer in its place is named as such
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise DatasetError(f"{path}: damaged or cut short ({error})") from error
    with archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
    for member in members:
        _refuse_unsafe(path, member)
    members.sort(key=lambda member: -member.filename.count("/"))  # the shallowest wins
    return {PurePosixPath(member.filename).name: _member(path, member) for member in members}


def _refuse_unsafe(path: Path, member: zipfile.ZipInfo) -> None:
    name = member.filename
    if name.startswith("/") or "\\" in name or ":" in name or ".." in PurePosixPath(name).parts:
        raise DatasetError(f"{path}: refused, it holds a file that would lie outside: {name!r}")


def _member(path: Path, member: zipfile.ZipInfo) -> DataFile:
    def unpacked() -> BinaryIO:
        # the member keeps the archive's file open for as long as it needs it
        with zipfile.ZipFile(path) as archive:
            return archive.open(member)  # type: ignore[return-value]

    return DataFile(f"{path}/{member.filename}", member.compress_size, unpacked)
