"""What a worker tells the outside: its metrics over HTTP, its heartbeat and its vectors in Redis.

Only what any reader could know: key names, fields and the score as they are published.
"""

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

_TIMEOUT_S = 5.0
_KEYS_AT_ONCE = 1000


@dataclass(frozen=True)
class Buckets:
    """A Prometheus histogram: how many values were at most each edge; the last edge is infinite."""

    edges: tuple[float, ...]  # (b,), rising
    counts: tuple[float, ...]  # (b,), rising

    @property
    def count(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    def since(self, before: "Buckets") -> "Buckets":
        """The values that came after `before`."""
        if not before.counts:
            return self
        return Buckets(self.edges, tuple(now - then for now, then in zip(self.counts, before.counts, strict=True)))

    def quantile(self, share: float) -> float | None:
        """The value below which `share` of all values lie, interpolated inside its bucket; None without any.

        As Prometheus' histogram_quantile: beyond the last finite edge it is that edge.
        """
        if self.count <= 0:
            return None
        rank = share * self.count
        lower, below = 0.0, 0.0
        for edge, count in zip(self.edges, self.counts, strict=True):
            if count >= rank and count > below:
                return lower if math.isinf(edge) else lower + (edge - lower) * (rank - below) / (count - below)
            lower, below = edge, count
        return lower


@dataclass(frozen=True)
class Metrics:
    """One look at a worker's /metrics."""

    records: float
    freshness: Buckets


def metrics(http_url: str) -> Metrics:
    """Ask for the metrics. Raises OSError when the worker does not answer."""
    with urllib.request.urlopen(f"{http_url}/metrics", timeout=_TIMEOUT_S) as answer:  # noqa: S310 - our own address
        text = answer.read().decode()
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    buckets = [
        (float(sample.labels["le"]), sample.value)
        for sample in families.get("freshet_freshness_seconds", [])
        if sample.name.endswith("_bucket")
    ]
    edges, counts = zip(*sorted(buckets), strict=True) if buckets else ((), ())
    records = sum(sample.value for sample in families.get("freshet_records", []) if sample.name.endswith("_total"))
    return Metrics(records, Buckets(edges, counts))


def ready(http_url: str) -> tuple[bool, str]:
    """Whether the worker is ready, and what it says."""
    try:
        with urllib.request.urlopen(f"{http_url}/readyz", timeout=_TIMEOUT_S) as answer:  # noqa: S310 - our own address
            return True, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return False, error.read().decode(errors="replace").strip()
    except OSError as error:
        return False, str(error)


def heartbeat(redis: Redis, prefix: str) -> dict[str, str]:
    """The worker's main figures; empty without a heartbeat."""
    fields: dict[bytes, bytes] = redis.hgetall(f"{prefix}:worker")  # type: ignore[assignment]
    return {name.decode(): value.decode() for name, value in fields.items()}


def number(fields: dict[str, str], name: str) -> float | None:
    """A figure of the heartbeat; None where it is missing or empty."""
    text = fields.get(name, "")
    return float(text) if text else None


@dataclass(frozen=True)
class Items:
    """Everything that Redis holds of the items, n of them."""

    ids: list[str]
    vectors: NDArray[np.float32]  # (n, dim)
    titles: dict[str, str]  # where the worker knows any


@dataclass(frozen=True)
class User:
    """What Redis holds of one user."""

    vector: NDArray[np.float32]  # (dim,)
    recent: list[str]  # item ids, newest first


class Vectors:
    """The published vectors, read as any client would."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix
        dim: bytes | None = redis.hget(f"{prefix}:meta", "dim")  # type: ignore[assignment]
        self._bytes = 4 * int(dim or 0)

    def count(self, kind: str) -> int:
        """How many users (`user`) or items (`item`) there are."""
        return sum(len(keys) for keys in self._keys(kind))

    def _keys(self, kind: str) -> Iterator[list[bytes]]:
        found: list[bytes] = []
        for key in self._redis.scan_iter(match=f"{self._prefix}:{kind}:*", count=_KEYS_AT_ONCE):
            found.append(key)
            if len(found) == _KEYS_AT_ONCE:
                yield found
                found = []
        yield found

    def user(self, user_id: str) -> User | None:
        """One user; None where there is no vector of the right length."""
        fields: list[Any] = self._redis.hmget(f"{self._prefix}:user:{user_id}", ["vector", "recent"])
        vector, recent = fields
        if vector is None or len(vector) != self._bytes:
            return None
        return User(np.frombuffer(vector, "<f4"), json.loads(recent or b"[]"))

    def items(self) -> Items:
        """All items. A vector of the wrong length is skipped, as every reader must."""
        start = len(f"{self._prefix}:item:".encode())
        ids, vectors, titles = [], [], {}
        for keys in self._keys("item"):
            for key, (vector, title) in zip(keys, self._fields(keys), strict=True):
                if vector is not None and len(vector) == self._bytes:
                    ids.append(key[start:].decode())
                    vectors.append(np.frombuffer(vector, "<f4"))
                    if title:
                        titles[ids[-1]] = title.decode()
        table = np.stack(vectors) if vectors else np.empty((0, self._bytes // 4), np.float32)
        return Items(ids, table, titles)

    def _fields(self, keys: list[bytes]) -> list[Any]:
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.hmget(key, ["vector", "title"])
            return list(pipeline.execute())


def top(user: User, items: Items, n: int) -> list[tuple[str, float]]:
    """The n items with the highest dot product, those in `recent` left out: (item id, score)."""
    scores = items.vectors @ user.vector  # (n,)
    seen = set(user.recent)
    ranked = (int(row) for row in np.argsort(-scores, kind="stable"))
    unseen = (row for row in ranked if items.ids[row] not in seen)
    return [(items.ids[row], float(scores[row])) for row, _ in zip(unseen, range(n), strict=False)]
