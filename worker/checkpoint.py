"""Checkpoints: one file holds every state that shapes later output, with the positions that belong to it.

A file is [payload][header][trailer]. The payload is what torch.save writes (tensors and plain data only, read with
`weights_only=True`); the header is JSON with the payload's SHA-256; the trailer closes the file with the header's
length and checksum. A file that was cut or flipped anywhere is therefore told from a whole one.
"""

import fcntl
import hashlib
import io
import json
import os
import socket
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import structlog
import torch

from worker.source import Partition, Positions, TopicIds

FORMAT = 2  # 2: with the counts of the fusion, the features of items and the ids of the topics
_MAGIC = b"FRESHET\n"
_TRAILER = struct.Struct("<QI8s")  # header's length in bytes, its CRC-32, magic
_MAX_HEADER_BYTES = 64 * 1024 * 1024

log = structlog.get_logger(__name__)


class CheckpointError(Exception):
    """A checkpoint that cannot be used, or a folder that cannot; the message says why, for people."""


class FormatError(CheckpointError):
    """A checkpoint that another version of the worker wrote."""


@dataclass(frozen=True, slots=True)
class Header:
    """What can be known of a checkpoint without reading its payload."""

    format: int
    created_ms: int
    epoch: int  # of the writer
    records: int  # read over the model's whole life
    positions: list[tuple[str, int, int]]  # topic, partition, NEXT offset to read
    model: dict[str, Any]  # the settings that shaped it
    counts: dict[str, int]  # of events by outcome
    topic_ids: TopicIds = field(default_factory=dict)  # of the topics that the positions belong to, where known
    payload_bytes: int = 0
    payload_sha256: str = ""

    def positions_by_partition(self) -> Positions:
        """The next offset to read of every partition."""
        return {Partition(topic, partition): offset for topic, partition, offset in self.positions}


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint file."""

    path: Path
    serial: int  # grows with every save in this folder
    bytes: int
    header: Header | None  # None: damaged
    problem: str = ""


# A saved model cannot go on under another value of these: what it has learned or counted would not fit.
SHAPING = ("family", "dim", "fusion", "neighbours", "seen_items", "popularity_half_life", "negative_power")


def misfits(header: Header, wanted: dict[str, Any]) -> list[str]:
    """What keeps a checkpoint from going on under the model's settings `wanted`; both values are named."""
    return [
        f"model.{name} is {wanted[name]!r} in the settings, but {header.model.get(name)!r} in the checkpoint"
        for name in SHAPING
        if header.model.get(name) != wanted[name]
    ]


class CheckpointFolder:
    """The checkpoints of one worker. Files are written beside their name, synced, then renamed into it."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.keep = path, keep
        self._lock: IO[str] | None = None

    def holder(self) -> str | None:
        """Who has the folder now; None when nobody has. Raises OSError where that cannot be seen."""
        try:
            with (self.path / "lock").open() as lock:
                return _holder(lock) if not _locked(lock, fcntl.LOCK_SH) else None
        except FileNotFoundError:
            return None

    def lock(self) -> None:
        """Make the folder this process's own. Raises CheckpointError that names who holds it."""
        with _usable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a+")
            locked = _locked(lock, fcntl.LOCK_EX)
        if not locked:
            with lock:
                raise CheckpointError(f"the checkpoint folder {self.path} is in use by {_holder(lock)}")
        self._lock = lock
        with suppress(OSError):  # a full disk: who holds it cannot be told, but that it is held can
            os.truncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        with _usable(self.path):
            for unfinished in self.path.glob("*.tmp"):
                unfinished.unlink(missing_ok=True)

    def unlock(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def list(self) -> list[Saved]:
        """Every checkpoint, newest first; damaged headers included."""
        paths = sorted(self.path.glob("checkpoint-*.pt"), key=_serial, reverse=True)
        return [_describe(path) for path in paths]

    def save(self, state: dict[str, Any], header: Header) -> Saved:
        """Write a checkpoint and drop those past the `keep` newest. Raises OSError; what was there stays."""
        serial = max((_serial(path) for path in self.path.glob("checkpoint-*.pt")), default=0) + 1
        path = self.path / f"checkpoint-{serial:010d}.pt"
        unfinished = path.with_suffix(".tmp")
        try:
            with unfinished.open("wb") as file:
                written = _write(file, state, header)
            unfinished.rename(path)
            _sync_folder(self.path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        self._retain()
        return Saved(path, serial, path.stat().st_size, written)

    def newest_sound(self) -> tuple[Saved, dict[str, Any]] | None:
        """The newest checkpoint that is whole, and its state; damaged ones are passed over, loudly.

        Raises FormatError for one of another version: it is not damaged, and what is older is not what was there.
        """
        for saved in self.list():
            try:
                return load(saved.path)
            except FormatError:
                raise
            except CheckpointError as error:
                log.error("checkpoint_damaged", path=str(saved.path), problem=str(error))
        return None

    def _retain(self) -> None:
        paths = sorted(self.path.glob("checkpoint-*.pt"), key=_serial, reverse=True)
        for path in paths[self.keep :]:
            path.unlink(missing_ok=True)


def load(path: Path) -> tuple[Saved, dict[str, Any]]:
    """A verified checkpoint and its state. Raises CheckpointError that says what is wrong with the file."""
    try:
        with path.open("rb") as file:
            header = _read_header(file, path)
            file.seek(0)
            payload = file.read(header.payload_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if hashlib.sha256(payload).hexdigest() != header.payload_sha256:
        raise CheckpointError(f"{path}: the content does not match its checksum")
    try:
        _refuse_to_unpack(payload)
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path}: holds more than tensors and plain data, or is no checkpoint: {error}"
        ) from error
    if _tensor_bytes(state) > len(payload):
        raise CheckpointError(f"{path}: its tensors would be larger than the file")
    return Saved(path, _serial(path), path.stat().st_size, header), state


@contextmanager
def as_checkpoint_error(path: Path) -> Iterator[None]:
    """Whatever goes wrong with a state that was read from `path` is told as a CheckpointError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} does not hold what this version goes on from ({reason})") from error


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"the checkpoint folder {path} cannot be used: {error.strerror}") from error


def _locked(lock: IO[str], kind: int) -> bool:
    """False where another process has it. Raises OSError, for example where a network volume knows no locks."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read().strip() or "another process"


def _refuse_to_unpack(payload: bytes) -> None:
    """ValueError for an archive that grows when it is read: torch.save does not compress."""
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        if sum(member.file_size for member in archive.infolist()) > len(payload):
            raise ValueError("it unpacks to more than its size")


def _tensor_bytes(state: Any) -> int:
    """What the tensors in `state` would take if each were copied: one may repeat a few bytes over and over."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(map(_tensor_bytes, state.values()))
    return sum(map(_tensor_bytes, state)) if isinstance(state, list | tuple) else 0


def _serial(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def _describe(path: Path) -> Saved:
    try:
        with path.open("rb") as file:
            return Saved(path, _serial(path), path.stat().st_size, _read_header(file, path))
    except (OSError, CheckpointError) as error:
        return Saved(path, _serial(path), 0, None, str(error))


class _Hashing(io.RawIOBase):
    """A file that knows the checksum and length of what went through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.length = 0
        self.error: OSError | None = None  # of a write that failed

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.length += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise


def _write(file: IO[bytes], state: dict[str, Any], header: Header) -> Header:
    hashing = _Hashing(file)
    try:
        torch.save(state, cast(IO[bytes], hashing))
    except RuntimeError:  # torch's own words for a write that failed
        if hashing.error is not None:
            raise hashing.error from None
        raise
    fields = asdict(header) | {"payload_bytes": hashing.length, "payload_sha256": hashing.sha256.hexdigest()}
    text = json.dumps(fields).encode()
    file.write(text)
    file.write(_TRAILER.pack(len(text), zlib.crc32(text), _MAGIC))
    file.flush()
    os.fsync(file.fileno())
    return Header(**fields)


def _read_header(file: IO[bytes], path: Path) -> Header:
    size = file.seek(0, os.SEEK_END)
    if size < _TRAILER.size:
        raise CheckpointError(f"{path}: cut short")
    file.seek(size - _TRAILER.size)
    length, checksum, magic = _TRAILER.unpack(file.read(_TRAILER.size))
    if magic != _MAGIC or length > min(_MAX_HEADER_BYTES, size - _TRAILER.size):
        raise CheckpointError(f"{path}: cut short, or no checkpoint")
    file.seek(size - _TRAILER.size - length)
    text = file.read(length)
    if zlib.crc32(text) != checksum:
        raise CheckpointError(f"{path}: the header does not match its checksum")
    with as_checkpoint_error(path):
        fields = json.loads(text)
        if not isinstance(fields["format"], int):
            raise CheckpointError(f"{path}: no format number in its header")
        if fields["format"] != FORMAT:
            raise FormatError(f"{path}: format {fields['format']!r}, but this version reads format {FORMAT}")
        fields["positions"] = [(str(topic), int(partition), int(at)) for topic, partition, at in fields["positions"]]
        # not there before topics had ids
        fields["topic_ids"] = {str(topic): str(known) for topic, known in fields.get("topic_ids", {}).items()}
        header = Header(**fields)
    if header.payload_bytes != size - _TRAILER.size - length:
        raise CheckpointError(f"{path}: {size - _TRAILER.size - length} bytes, not {header.payload_bytes}")
    return header


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
