"""What a million users and a million items take: in Redis, in the worker's memory, and on disk.

    python -m benchmarks.sizing [--ids N] [--clicks N] [--dim N]

The worker's own loop reads clicks from memory, learns from them, publishes to a real Redis and saves a checkpoint,
once with a thousand ids and once with N, each in a process of its own. The difference is scaled to a million. Tables
double as they grow, so N is best just below a power of two, where they are full, as they are at a million (2^20).
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import SecretStr
from redis import Redis

from model.config import ModelConfig
from model.learner import OnlineLearner
from replay.local_stack import start_redis
from worker.checkpoint import CheckpointFolder, now_ms
from worker.events import encode
from worker.file_source import Record
from worker.loop import Worker
from worker.offline import offline_worker
from worker.publisher import Publisher
from worker.settings import EvaluationSettings, LogSettings, PublishSettings, RedisSettings, RuntimeSettings, Settings
from worker.state import WorkerState
from worker.telemetry import configure_logging
from worker.updates import Meta

FEW = 1000  # ids of the other kind, and of the smaller run
MILLION = 1_000_000
NOW_MS = 1_800_000_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """What one run reads: `users` and `items` that are all there, in `events` clicks."""

    users: int
    items: int
    events: int
    dim: int


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a run took."""

    redis: float
    memory: float  # resident, after everything was published
    saving: float  # resident at most, while a checkpoint was saved
    checkpoint: float

    def per_million(self, smaller: "Bytes", ids: int) -> "Bytes":
        """What a million ids take, by the difference that `ids` have made."""
        return Bytes(*((a - b) / ids * MILLION for a, b in zip(astuple(self), astuple(smaller), strict=True)))


def settings_for(load: Load, redis_url: str) -> Settings:
    """The worker's own, with room for the ids; learning is made cheap where that does not change a size."""
    room = max(MILLION, load.users, load.items)
    return Settings(
        model=ModelConfig(
            dim=load.dim, user_capacity=room, item_capacity=room, batch_size=1024, negatives=64, replay=0
        ),
        redis=RedisSettings(url=SecretStr(redis_url)),
        publish=PublishSettings(item_interval_s=3600.0),  # once, at the end
        evaluation=EvaluationSettings(share=0.0),
        runtime=RuntimeSettings(device="cpu"),
    )


def clicks(load: Load) -> Iterator[Record]:
    """Every user and every item comes up in turn, and who clicks what is as good as random."""
    rng, told = np.random.default_rng(0), 0
    users, items = rng.permutation(load.users), rng.permutation(load.items)
    for n in range(load.events):
        if n % load.users == 0:
            rng.shuffle(users)
        if n % load.items == 0:
            rng.shuffle(items)
        yield encode(f"user-{users[n % load.users]:08d}", f"item-{items[n % load.items]:08d}"), NOW_MS
        if 10 * (n + 1) // load.events > told:
            told = 10 * (n + 1) // load.events
            print(f"  {load.users} users, {load.items} items: {10 * told}%", file=sys.stderr, flush=True)


def measure(load: Load) -> Bytes:
    """Run a worker over `load`; to be called in a process of its own."""
    configure_logging(LogSettings(level="warning"))
    with tempfile.TemporaryDirectory() as folder, start_redis(Path(folder) / "redis") as server:
        settings = settings_for(load, server.url)
        worker = offline_worker(settings, clicks(load), lambda learner: publisher_of(settings, learner))
        worker.publisher.start()
        worker.run(drain=True)
        worker.outbox.hurry()
        wait_for(lambda: worker.outbox.settled and not worker.outbox.items_backlog, worker)
        if worker.ingest.counts["learned"] != load.events:
            raise RuntimeError(f"not all of the {load.events} clicks were learned: {dict(worker.ingest.counts)}")
        give_back_what_is_free()
        memory, redis = status_bytes("VmRSS"), used_memory(server.url)
        checkpoint = save(worker, Path(folder) / "checkpoints")
        worker.stop()
        return Bytes(redis, memory, status_bytes("VmHWM"), checkpoint)


def publisher_of(settings: Settings, learner: OnlineLearner) -> Publisher:
    meta = Meta(learner.readout.dim, learner.family.name, learner.readout.exact, "sizing", now_ms())
    return Publisher(settings.redis, settings.publish, meta)


def wait_for(condition: Callable[[], bool], worker: Worker) -> None:
    """Turn the loop until `condition`."""
    while not condition():
        worker.run(drain=True)
        time.sleep(0.01)


def give_back_what_is_free() -> None:
    """Memory that the allocator keeps for later would hide what the ids take."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def save(worker: Worker, path: Path) -> int:
    """The size of a checkpoint. What saving takes at most shows as VmHWM, which begins anew here."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    state = WorkerState(worker.learner, worker.ingest, worker.outbox, worker.source, lambda: 1, "sizing")
    folder = CheckpointFolder(path, keep=1)
    folder.lock()
    saved = folder.save(*state.snapshot())
    folder.unlock()
    return saved.bytes


def status_bytes(name: str) -> int:
    """A figure of this process's memory."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) * 1024


def used_memory(redis_url: str) -> int:
    with Redis.from_url(redis_url) as client:
        return int(client.info("memory")["used_memory"])  # type: ignore[index]


def apart(load: Load) -> Bytes:
    """`measure` in a process that has nothing else in its memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        found = processes.submit(measure, load).result()
    print(f"  {load}: {found}", file=sys.stderr, flush=True)
    return found


def row(name: str, figures: Bytes) -> str:
    """One row of the table in docs/operations.md."""
    return f"| {name} | " + " | ".join(f"{figure / 1e9:.2f} GB" for figure in astuple(figures)) + " |"


def machine() -> str:
    """Where this was measured."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return f"{model}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"


def main() -> None:
    """Prints the table's rows, and how they came about."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizing", description=__doc__.partition("\n")[0])
    parser.add_argument("--ids", type=int, default=2**14 - 100, help="users, and items, of the larger runs")
    parser.add_argument("--clicks", type=int, default=20, help="of each id")
    parser.add_argument("--dim", type=int, default=64, help="width of an embedding")
    options = parser.parse_args()
    ids, events = options.ids, options.ids * options.clicks
    base = apart(Load(FEW, FEW, FEW * options.clicks, options.dim))
    users = apart(Load(ids, FEW, events, options.dim)).per_million(base, ids - FEW)
    # the same clicks of the same users, by few items and by many
    some = ids // 4
    few, many = (apart(Load(some, items, events, options.dim)) for items in (FEW, ids))
    items = many.per_million(few, ids - FEW)
    print("| | Redis | worker's memory | while it saves | a checkpoint |", "|---|---|---|---|---|", sep="\n")
    print(row(f"a worker with {FEW} users and {FEW} items", base))
    print(row("each million users more", users), row("each million items more", items), sep="\n")
    print(f"\nDim {options.dim}, {options.clicks} clicks an id; measured with {ids:,} ids and scaled. {machine()}.")
    print(json.dumps({"ids": ids, "base": asdict(base), "users": asdict(users), "items": asdict(items)}))


if __name__ == "__main__":
    main()
