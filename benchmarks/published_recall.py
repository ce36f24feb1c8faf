"""How much of the model's recall reaches readers: measured from Redis, by a process that knows only what is published.

    python -m benchmarks.published_recall [--path FILE] [--limit N] [--every N] [--rate N]

A broker, a Redis and a worker run as in production. Before every N-th event this process waits until everything before
it is published, reads that user's vector, ranks by the dot product with the items' vectors (read again every second, as
a client would), and looks whether the event's item is among the first ten; the same with the published list of best
items. Candidates are the items that appeared in the stream and that the user has not clicked. The same events are
then ranked by the worker's own loop over the file, in process, by the full score.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
from redis import Redis
from rich.progress import track

from model.batch import Int32, Int64, PastEvents
from model.config import ModelConfig
from replay import kafka_client
from replay.datasets import Dataset, Interaction, movielens
from replay.demo import WorkerProcess
from replay.local_stack import start_broker, start_redis
from replay.pacing import FixedRate, Pacer
from replay.producer import EventProducer
from worker.events import encode
from worker.file_source import Record
from worker.offline import offline_worker
from worker.settings import Settings

K = 10
PREFIX, TOPIC = "rec", "clicks"
_ITEMS_S = 1.0  # between two looks at all items' vectors
_WAIT_S = 60.0


def main() -> int:
    """Run it; writes reports/published-recall.json."""
    options = _options()
    dataset = movielens.load(say=print) if options.path is None else movielens.read(options.path, options.path.name)
    events = [event for event, _ in zip(dataset.interactions(), range(options.limit or len(dataset)), strict=False)]
    with tempfile.TemporaryDirectory() as folder:
        outside = _measured(events, dataset, Path(folder), options)
    inside = _in_process(events)
    sampled = np.array(sorted(outside))
    hits = {"in_process": [inside[n] for n in sampled]}
    hits |= {name: [outside[n][place] for n in sampled] for place, name in enumerate(("dot_product", "top_list"))}
    report: dict[str, object] = {"dataset": dataset.name, "events": len(events), "sampled": len(sampled)}
    full = float(np.mean(hits["in_process"]))
    for name, found in hits.items():
        report[f"{name}_recall_at_10"] = round(float(np.mean(found)), 4)
        report[f"{name}_share"] = round(float(np.mean(found)) / full, 4) if full else None
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="file, folder or zip of ratings (default: MovieLens-100k)")
    parser.add_argument("--limit", type=int, help="only the first N events")
    parser.add_argument(
        "--every", type=int, default=25, metavar="N", help="every N-th event is looked at (default: 25)"
    )
    parser.add_argument("--rate", type=float, default=1000.0, metavar="N", help="events per second (default: 1000)")
    parser.add_argument("--report", type=Path, default=Path("reports/published-recall.json"))
    return parser.parse_args()


def _measured(
    events: list[Interaction], dataset: Dataset, folder: Path, options: argparse.Namespace
) -> dict[int, tuple[bool, bool]]:
    """For every sampled event, by number: hit by the published vectors, hit by the published list."""
    with start_broker(folder / "broker") as broker, start_redis(folder / "redis") as server:
        kafka_client.ensure_topic(broker.bootstrap_servers, TOPIC, 1)
        settings = {
            "FRESHET_KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap_servers,
            "FRESHET_KAFKA__TOPICS": TOPIC,
            "FRESHET_REDIS__URL": server.url,
            "FRESHET_REDIS__PREFIX": PREFIX,
            "FRESHET_PUBLISH__TOP": str(K),
            "FRESHET_EVALUATION__SHARE": "0.01",
        }
        with (
            WorkerProcess(folder / "worker", settings),
            EventProducer(broker.bootstrap_servers, TOPIC) as producer,
            Redis.from_url(server.url) as redis,
        ):
            reader = _Reader(redis)
            return dict(_hits(events, dataset, producer, reader, options))


def _hits(
    events: list[Interaction], dataset: Dataset, producer: EventProducer, reader: "_Reader", options: argparse.Namespace
) -> Iterator[tuple[int, tuple[bool, bool]]]:
    pacer: Pacer = FixedRate(options.rate)
    for number, event in enumerate(track(events, description="events")):
        if number and number % options.every == 0:
            producer.flush()
            reader.wait_for(number)
            yield number, reader.hits(event)
        pacer.wait(event.timestamp_ms)
        producer.send(number, event.user, encode(event.user, event.item, event_id=f"{dataset.name}-{number}"))
        reader.note(event)


class _Reader:
    """A client: what it knows is in Redis, or was clicked before its eyes."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._clicked: dict[str, set[str]] = defaultdict(set)
        self._appeared: dict[str, int] = {}  # item id -> its place in the order of appearance
        self._vectors = np.empty((0, 0), np.float32)  # by that place; 0 = not published yet
        self._there = np.empty(0, np.bool_)
        self._read_s = float("-inf")

    def note(self, event: Interaction) -> None:
        """The event is on its way."""
        self._clicked[event.user].add(event.item)
        self._appeared.setdefault(event.item, len(self._appeared))

    def wait_for(self, position: int) -> None:
        """Until readers have seen everything before `position`."""
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            positions = json.loads(self._redis.hget(f"{PREFIX}:worker", "positions") or b"{}")
            if positions.get(TOPIC, {}).get("0", 0) >= position:
                return
            time.sleep(0.002)
        raise SystemExit(f"event {position} was not published within {_WAIT_S:g} s")

    def hits(self, event: Interaction) -> tuple[bool, bool]:
        """Whether the event's item is in the first ten by the dot product, and in the published list."""
        vector, listed = (
            self._redis.hget(f"{PREFIX}:user:{event.user}", "vector"),
            self._redis.hget(f"{PREFIX}:top:{event.user}", "items"),
        )
        if event.item not in self._appeared or event.item in self._clicked[event.user]:
            return False, False  # by the protocol
        if vector is None:  # nobody knows this user: the popular items, as any client would
            best = cast(list[bytes], self._redis.zrevrange(f"{PREFIX}:popular", 0, K - 1))
            return (popular := event.item.encode() in best), popular
        names = [name for name, _ in json.loads(listed or b"[]")][:K]
        return self._rank(event, np.frombuffer(cast(bytes, vector), "<f4")) < K, event.item in names

    def _rank(self, event: Interaction, vector: np.ndarray) -> int:
        if time.monotonic() > self._read_s + _ITEMS_S or len(self._vectors) < len(self._appeared):
            self._read_items(len(vector))
        scores = np.where(self._there, self._vectors @ vector, -np.inf)
        scores[[self._appeared[item] for item in self._clicked[event.user]]] = -np.inf
        own = self._appeared[event.item]
        better = scores > scores[own]
        better[:own] |= scores[:own] == scores[own]
        return int(better.sum()) if np.isfinite(scores[own]) else K

    def _read_items(self, dim: int) -> None:
        with self._redis.pipeline(transaction=False) as pipeline:
            for item in self._appeared:
                pipeline.hget(f"{PREFIX}:item:{item}", "vector")
            found = pipeline.execute()
        self._there = np.array([len(value or b"") == 4 * dim for value in found])
        rows = [np.frombuffer(v, "<f4") if ok else np.zeros(dim) for v, ok in zip(found, self._there, strict=True)]
        self._vectors = np.array(rows, np.float32).reshape(len(found), dim)
        self._read_s = time.monotonic()


class _Hits:
    """Which events the model's own ranking has in its first ten."""

    top = 0

    def __init__(self, events: int) -> None:
        self.of_event = np.zeros(events, np.bool_)

    def ranked(self, events: PastEvents, ranks: Int64, popularity_ranks: Int64, top: Int32) -> None:  # noqa: ARG002
        """See RankListener. Events are numbered from 1."""
        self.of_event[events.sequence - 1] = (ranks >= 0) & (ranks < K)


def _in_process(events: list[Interaction]) -> np.ndarray:
    now_ms = time.time_ns() // 1_000_000
    records: Iterator[Record] = (
        (encode(event.user, event.item), now_ms) for event in track(events, description="in process")
    )
    worker = offline_worker(Settings(model=ModelConfig()), records)
    worker.learner.listener = hits = _Hits(len(events))
    worker.run(drain=True)
    worker.learner.learn()
    return hits.of_event


if __name__ == "__main__":
    sys.exit(main())
