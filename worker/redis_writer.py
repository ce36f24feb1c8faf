"""The server-side calls of one worker: each is compared with its claim before anything is written."""

import hashlib
import math
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import chain
from typing import Any, cast

import numpy as np
from redis import Redis
from redis.exceptions import NoScriptError

from worker.keys import LAYOUT, Keys
from worker.settings import PublishSettings, RedisSettings
from worker.updates import Heartbeat, ItemVectors, Meta, Popular, UserVectors

_IDENTITY = ("layout", "dim", "dtype", "metric", "family")  # what claim.lua does not let change


class SupersededError(Exception):
    """A newer worker has the claim."""

    def __init__(self, epoch: int, writer: str) -> None:
        super().__init__(f"a newer worker has taken over (epoch {epoch}" + (f", {writer})" if writer else ")"))
        self.epoch = epoch


class ClaimLostError(Exception):
    """The claim, or a write that was acknowledged, is not in Redis any more."""


class PrefixConflictError(Exception):
    """Vectors of another kind were published under this prefix."""


class RedisWriter:
    """Not thread-safe. Every method may raise redis-py's errors, SupersededError and ClaimLostError.

    Nothing is retried here, and everything may be called again after a failure.
    """

    def __init__(
        self,
        client: Redis,
        redis: RedisSettings,
        publish: PublishSettings,
        meta: Meta,
        now_ms: Callable[[], int],
    ) -> None:
        self.epoch = 0  # 0 until claimed
        self._client = client
        self._keys = Keys(redis.prefix)
        self._ttl_s = redis.ttl_s
        self._stats_length = publish.stats_length
        self._meta = meta
        self._now_ms = now_ms
        self._writer, self._instance = f"{socket.gethostname()}:{os.getpid()}", uuid.uuid4().hex
        self._claim_script, self._publish_script = _Script("claim.lua"), _Script("publish.lua")
        # A worker that was acknowledged within the limit was not away; see claim.lua.
        self._limit_ms = math.ceil(1000 * (3 * publish.heartbeat_s + redis.timeout_s))
        self._patience_ms = 2 * self._limit_ms
        self._witness_ms = 0  # server's time of the last acknowledgement
        self._acknowledged = 0  # number of the last write that is known to be done
        self._positions = b""

    def claim(self, least_epoch: int, replace: bool) -> bytes:
        """Take the prefix over, with an epoch above every other's and above `least_epoch`.

        Returns the positions that readers have seen (JSON, b"" = none). Raises PrefixConflictError where
        vectors of another layout, dim or family are published, unless `replace`.
        """
        status, *rest = self._claim_call("start", least_epoch, replace)
        if status == b"CONFLICT":
            raise PrefixConflictError(self._conflict(rest))
        self.epoch, self._positions = int(rest[0]), rest[1]
        return self._positions

    def reclaim(self) -> bool:
        """Take a lost claim back; False while it must wait and be called again, once a heartbeat."""
        status, *_ = self._claim_call("return", self.epoch, replace=True)
        return bool(status == b"OK")

    def users(self, update: UserVectors, rows: Sequence[int], first: bool) -> int:
        """Write these rows; returns how many were refused because their keys are newer.

        The first call of an update also sets the positions: readers may have seen everything before them.
        """
        columns = {"vector": _cut(update.vectors, rows), "events": _pick(update.events, rows)}
        if update.recent:
            columns["recent"] = _pick(update.recent, rows)
        positions = update.positions if first else b""
        if ranked := [row for row in rows if row < len(update.top)]:
            self._write(self._keys.tops, update, ranked, {"items": _pick(update.top, ranked)}, b"")
        refused = self._write(self._keys.users, update, rows, columns, positions)
        self._positions = positions or self._positions
        return refused

    def items(self, update: ItemVectors, rows: Sequence[int]) -> int:
        """Write these rows; returns how many were refused because their keys are newer."""
        columns = {"vector": _cut(update.vectors, rows), "events": _pick(update.events, rows)}
        if update.titles:
            columns["title"] = _pick(update.titles, rows)
        if update.attributes:
            columns["attributes"] = _pick(update.attributes, rows)
        if len(update.available):
            columns["available"] = [int(flag) for flag in _pick(update.available, rows)]
        return self._write(self._keys.items, update, rows, columns, b"")

    def remove(self, ids: Sequence[tuple[str, str]], version: int) -> int:
        """Delete the keys of ("user", id) and ("item", id); returns how many were refused: they are newer."""
        keys = [self._keys.user(name) if table == "user" else self._keys.item(name) for table, name in ids]
        tops = [self._keys.tops + name for table, name in ids if table == "user"]
        return self._publish("remove", [*tops, *keys], [version])

    def popular(self, update: Popular) -> None:
        """Replace the list of popular items."""
        pairs = zip(update.scores.tolist(), update.ids, strict=True)
        self._publish("popular", [self._keys.popular], [*chain.from_iterable(p for p in pairs if math.isfinite(p[0]))])

    def heartbeat(self, update: Heartbeat) -> None:
        """Set the main figures and append them to the stream."""
        fields = chain.from_iterable((name, _text(value)) for name, value in update.fields.items())
        self._publish("heartbeat", [self._keys.stats], [self._now_ms(), self._stats_length, *fields])

    def watch(self) -> None:
        """Find out whether the claim and everything acknowledged are still there; writes nothing."""
        self._publish("watch", [], [])

    def sweep(self, cursor: int, count: int, version: int) -> tuple[int, int]:
        """Look at about `count` keys from `cursor` on; delete what only older epochs or versions than this wrote.

        Returns the next cursor (0 = that was all) and how many were deleted.
        """
        reply = cast(tuple[int, list[bytes]], self._client.scan(cursor, match=self._keys.pattern, count=count))
        heads = (self._keys.users.encode(), self._keys.tops.encode(), self._keys.items.encode())
        keys = [key for key in reply[1] if key.startswith(heads)]
        return reply[0], self._publish("sweep", keys, [version]) if keys else 0

    def _write(
        self,
        head: str,
        update: UserVectors | ItemVectors,
        rows: Sequence[int],
        columns: dict[str, list[Any]],
        positions: bytes,
    ) -> int:
        keys = [head + update.ids[row] for row in rows]
        values = chain.from_iterable(zip(*columns.values(), strict=True))
        arguments = [update.version, update.updated_ms, self._ttl_s, positions, len(columns)]
        return self._publish("write", keys, [*arguments, *columns, *values])

    def _publish(self, operation: str, keys: Sequence[str | bytes], arguments: list[Any]) -> int:
        """Returns the operation's count."""
        status, server_ms, *rest = self._publish_script.run(
            self._client,
            [self._keys.meta, self._keys.worker, *keys],
            [operation, self.epoch, self._acknowledged, *arguments],
        )
        if status == b"SUPERSEDED":
            raise SupersededError(int(rest[0]), rest[1].decode())
        if status != b"OK":
            raise ClaimLostError
        self._witness_ms = server_ms
        if operation not in ("watch", "sweep"):
            self._acknowledged += 1
        return int(rest[0])

    def _claim_call(self, mode: str, epoch: int, replace: bool) -> list[Any]:
        """Returns the status and what follows the server's time."""
        fields = chain.from_iterable(self._fields().items())
        arguments = [mode, epoch, self._writer, self._now_ms(), self._positions, self._acknowledged]
        status, server_ms, *rest = self._claim_script.run(
            self._client,
            [self._keys.meta, self._keys.worker, self._keys.claim],
            [*arguments, self._witness_ms, self._limit_ms, self._patience_ms, int(replace), self._instance, *fields],
        )
        if status == b"SUPERSEDED":
            raise SupersededError(int(rest[0]), rest[1].decode())
        if status == b"OK":
            self._witness_ms = server_ms
        return [status, *rest]

    def _fields(self) -> dict[str, str | int]:
        """What readers find in meta, but the epoch; what must not change first."""
        meta = self._meta
        identity: tuple[str | int, ...] = (LAYOUT, meta.dim, "float32le", "dot", meta.family)
        others: dict[str, str | int] = {"exact": int(meta.exact), "model": meta.model, "started_ms": meta.started_ms}
        return dict(zip(_IDENTITY, identity, strict=True)) | others

    def _conflict(self, there: list[bytes]) -> str:
        ours = self._fields()
        theirs = {name: value.decode() for name, value in zip(_IDENTITY, there, strict=True)}
        differ = [
            f"{name} is {value} there and {ours[name]} here"
            for name, value in theirs.items()
            if value not in ("", str(ours[name]))
        ]
        return f"{self._keys.meta}: {', '.join(differ)}; vectors of another kind need another prefix"


class _Script:
    """A server-side script, sent whole only to a server that does not know it."""

    def __init__(self, file: str) -> None:
        self._text = files("worker").joinpath(file).read_bytes()
        self._sha = hashlib.sha1(self._text, usedforsecurity=False).hexdigest()

    def run(self, client: Redis, keys: list[Any], arguments: list[Any]) -> list[Any]:
        try:
            return cast(list[Any], client.evalsha(self._sha, len(keys), *keys, *arguments))
        except NoScriptError:
            return cast(list[Any], client.eval(self._text.decode(), len(keys), *keys, *arguments))


def _cut(vectors: np.ndarray, rows: Sequence[int]) -> list[bytes]:
    """Little-endian float32 bytes of each row, cut from one array."""
    width = 4 * vectors.shape[1]
    whole = np.ascontiguousarray(vectors[rows], dtype="<f4").tobytes()
    return [whole[start : start + width] for start in range(0, len(whole), width)]


def _pick(column: Any, rows: Sequence[int]) -> list[Any]:
    if isinstance(column, np.ndarray):
        return cast(list[Any], column[rows].tolist())
    return [column[row] for row in rows]


def _text(value: str | float | None) -> str | int | float:
    """A heartbeat's value as Redis takes it; an empty one takes the field away."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return int(value) if isinstance(value, bool) else value
