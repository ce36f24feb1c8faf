"""The crash matrix: one stream, one worker, killed with SIGKILL again and again, and nothing is lost or doubled.

    python -m tests.faults.crash_matrix [--kills 100] [--seed 0] [--out reports/crash-matrix.json]

Each life of the worker gets a share of the stream and is killed at a random moment of a kind that is drawn, too:
while it starts, in mid-stream, inside the save of a checkpoint, between a save and the commit of its positions, or in
the middle of publishing. After the last kill it reads the rest and stops. Beside it, an uninterrupted worker reads the
same topic into a folder and a prefix of its own. Then it is proved, from what both have saved and published:

- events by user and by item in the model are those of the stream: none lost, none doubled;
- the whole learned state (weights, optimizer, ids, histories, mini-batch, replay, metrics) is the same bits;
- Redis holds the same vectors for both.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from kafka import KafkaProducer
from redis import Redis
from rich.console import Console
from rich.progress import track
from rich.table import Table

from replay.local_stack import create_topic, start_broker, start_redis
from tests.streams import clustered
from tests.worker_process import WorkerProcess
from worker.checkpoint import load
from worker.events import encode

EVENTS_A_LIFE = 512
BATCH = 64  # a divisor of the stream's length: at the end every mini-batch was full
SETTINGS = {
    "model__batch_size": BATCH,
    "runtime__deterministic": "true",
    "checkpoint__every_events": 300,
    "checkpoint__every_s": 0.3,
    "publish__background_per_s": 100_000,
    "publish__item_tolerance": 0,
    "publish__heartbeat_s": 0.05,
}
MOMENTS = ("start", "stream", "save", "commit", "publish")


@dataclass
class Matrix:
    """What happened."""

    kills: Counter[str] = field(default_factory=Counter)
    reread: int = 0
    recover_s: list[float] = field(default_factory=list)


class Stream:
    """The events, sent share by share, and what a model that counts each once must hold."""

    def __init__(self, count: int, seed: int, servers: str, topic: str) -> None:
        events = clustered(count, seed=seed, users=500, items=120)
        self.users, self.items = events.users, events.items
        self._topic, self._sent = topic, 0
        self._producer = KafkaProducer(bootstrap_servers=servers, acks="all")

    def send(self, count: int) -> None:
        """The next `count` events."""
        part = range(self._sent, min(self._sent + count, len(self.users)))
        futures = [
            self._producer.send(self._topic, encode(self.users[n], self.items[n], event_id=str(n)), key=b"k")
            for n in part
        ]
        self._producer.flush()
        for future in futures:
            future.get(60)
        self._sent = part.stop

    def close(self) -> None:
        self._producer.close()


class Moment:
    """Waits for the moment at which a life ends."""

    def __init__(self, kind: str, worker: WorkerProcess, redis: Redis, rng: random.Random) -> None:
        self._kind, self._worker, self._redis = kind, worker, redis
        self._delay_s = rng.uniform(0.0, 2.5 if kind == "start" else 0.6)
        self._late_s = rng.choice((0.0, 0.0, 0.001, 0.004))  # a little into what was waited for

    def wait(self) -> None:
        """Return at the moment, or when it has not come for a while."""
        condition: dict[str, Callable[[], bool]] = {
            "save": lambda: bool(self._files("*.tmp")),
            "commit": self._changed(lambda: max(self._files("*.pt"), default="")),
            "publish": self._changed(lambda: self._redis.hget("rec:worker", "writes")),
        }
        if self._kind in condition:
            until(condition[self._kind], self._worker, 3, raises=False)
            time.sleep(self._late_s)
        else:
            time.sleep(self._delay_s)

    def _files(self, pattern: str) -> list[str]:
        return [path.name for path in (self._worker.home / "checkpoints").glob(pattern)]

    @staticmethod
    def _changed(value: Callable[[], object]) -> Callable[[], bool]:
        before = value()
        return lambda: value() != before


def until(condition: Callable[[], bool], worker: WorkerProcess, timeout_s: float, *, raises: bool = True) -> None:
    """Poll closely: what is waited for lasts milliseconds. RuntimeError when the worker ends by itself."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        late = time.monotonic() > deadline
        if worker.process is None or worker.process.poll() is not None or (late and raises):
            raise RuntimeError(worker.describe())
        if late:
            return
        time.sleep(0.0005)


def running(worker: WorkerProcess) -> bool:
    """It publishes, and is the one that does."""
    beat = worker.heartbeat()
    own = worker.process is not None and beat.get("writer", "").endswith(f":{worker.process.pid}")
    return own and beat.get("state") == "running"


def live_and_die(worker: WorkerProcess, stream: Stream, redis: Redis, rng: random.Random, matrix: Matrix) -> None:
    """One life: start, a share of the stream in two parts, SIGKILL at a drawn moment."""
    kind = rng.choice(MOMENTS)
    began = time.monotonic()
    worker.start()
    first = rng.randrange(EVENTS_A_LIFE)
    stream.send(first)
    if kind != "start":
        until(lambda: running(worker), worker, 120)
        matrix.recover_s.append(time.monotonic() - began)
    moment = Moment(kind, worker, redis, rng)
    stream.send(EVENTS_A_LIFE - first)
    moment.wait()
    worker.kill()
    matrix.kills[kind] += 1
    saved = max((saved.header.records for saved in worker.checkpoints() if saved.header), default=0)
    matrix.reread += max(0, int(worker.heartbeat().get("events_read", 0)) - saved)


def bits(a: object, b: object) -> int:
    """Bits in which two states differ; what is not comparable counts as one."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return sum(bits(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return sum(bits(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype:
        x, y = (np.frombuffer(t.contiguous().numpy().tobytes(), np.uint8) for t in (a, b))
        return int(np.bitwise_count(x ^ y).sum())
    return 0 if type(a) is type(b) and a == b else 1


def counted(state: dict[str, dict[str, torch.Tensor]], kind: str) -> Counter[str]:
    """Events by id in a saved learner."""
    ids = state[kind]
    ends = ids["lengths"].clamp_min(0).cumsum(0).tolist()
    text = ids["text"].numpy().tobytes()
    names = [text[end - max(0, n) : end].decode() for end, n in zip(ends, ids["lengths"].tolist(), strict=True)]
    counts = state["log"]["count"] if kind == "users" else state["sampler"]["clicks"]
    return Counter({name: n for name, n in zip(names, counts.tolist(), strict=True) if name})


def vectors(url: str, prefix: str) -> dict[str, np.ndarray]:
    """Every published vector under a prefix, by kind and id."""
    with Redis.from_url(url) as redis:
        keys = [key for kind in ("user", "item") for key in redis.scan_iter(match=f"{prefix}:{kind}:*", count=1000)]
        found = {key.decode().partition(":")[2]: redis.hget(key, "vector") for key in keys}
    return {key: np.frombuffer(value, "<f4") for key, value in found.items() if isinstance(value, bytes)}


def finish(worker: WorkerProcess, records: int) -> dict[str, np.ndarray]:
    """Let it read the rest, until no vector moves any more; stop it. What it has published."""
    worker.wait_read(records)
    before, now = {}, vectors(worker.redis_url, worker.prefix)
    while before.keys() != now.keys() or not all((before[key] == now[key]).all() for key in now):
        time.sleep(0.5)  # rounds of the background follow each other at once under these settings
        before, now = now, vectors(worker.redis_url, worker.prefix)
    if worker.stop() != 0:
        raise RuntimeError(worker.describe())
    return now


def run(kills: int, seed: int, home: Path, console: Console) -> dict[str, object]:
    """The whole matrix; the figures of the report."""
    rng, matrix, total = random.Random(seed), Matrix(), (kills + 1) * EVENTS_A_LIFE
    with start_broker(home / "broker") as broker, start_redis(home / "redis") as server:
        create_topic(broker.bootstrap_servers, "clicks")
        stream = Stream(total, seed, broker.bootstrap_servers, "clicks")
        redis = Redis.from_url(server.url, decode_responses=True)
        at = broker.bootstrap_servers, "clicks", server.url
        with (
            WorkerProcess(home / "killed", *at, redis__prefix="rec", **SETTINGS) as killed,
            WorkerProcess(home / "whole", *at, redis__prefix="whole", **SETTINGS) as whole,
        ):
            for _ in track(range(kills), "kills", console=console):
                live_and_die(killed, stream, redis, rng, matrix)
            stream.send(EVENTS_A_LIFE)
            stream.close()
            published = finish(killed.start(), total)
            reference = finish(whole.start(), total)
            return figures(killed, whole, stream, matrix, published, reference)


def figures(
    killed: WorkerProcess,
    whole: WorkerProcess,
    stream: Stream,
    matrix: Matrix,
    published: dict[str, np.ndarray],
    reference: dict[str, np.ndarray],
) -> dict[str, object]:
    """What the saved states and the published vectors prove."""
    a, b = (load(worker.checkpoints()[0].path)[1] for worker in (killed, whole))
    learned = a["learner"]
    lost = doubled = 0
    for kind, truth in (("users", Counter(stream.users)), ("items", Counter(stream.items))):
        model = counted(learned, kind)
        lost += (truth - model).total()
        doubled += (model - truth).total()
    same = published.keys() == reference.keys()
    both = published.keys() & reference.keys()
    apart = max((float(np.abs(published[key] - reference[key]).max()) for key in both), default=0.0)
    return {
        "kills": matrix.kills.total(),
        "kills_by_moment": dict(matrix.kills),
        "events": len(stream.users),
        "events_reread": matrix.reread,
        "lost": lost,
        "doubled": doubled,
        "differing_bits": bits(learned, b["learner"]) + bits(a["ingest"], b["ingest"]),
        "published_ids_equal": same,
        "published_vectors": len(published),
        "published_max_difference": apart,
        "recover_p50_s": round(float(np.median(matrix.recover_s)), 3),
        "recover_max_s": round(float(np.max(matrix.recover_s)), 3),
    }


def sound(report: dict[str, object]) -> bool:
    """Nothing lost, nothing doubled, the same bits, the same vectors."""
    zeros = all(report[name] == 0 for name in ("lost", "doubled", "differing_bits"))
    difference = report["published_max_difference"]
    # One batch of users is not multiplied in the same order as another: the last digit may differ.
    return zeros and bool(report["published_ids_equal"]) and isinstance(difference, float) and difference < 1e-5


def main() -> int:
    """Run the matrix, print it, write it; exit code 1 when it is not sound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("reports/crash-matrix.json"))
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="crash-matrix-") as home:
        report = {"seed": options.seed} | run(options.kills, options.seed, Path(home), console)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    table = Table("figure", "value", title="crash matrix", box=None)
    for name, value in report.items():
        table.add_row(name, json.dumps(value))
    console.print(table)
    console.print("sound" if sound(report) else "NOT SOUND", f"; written to {options.out}")
    return 0 if sound(report) else 1


if __name__ == "__main__":
    sys.exit(main())
