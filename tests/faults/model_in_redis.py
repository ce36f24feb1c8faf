"""Is what Redis holds the very model that the worker has saved?"""

import json
from collections import Counter

import numpy as np
import torch
from redis import Redis

from model.config import ModelConfig
from model.learner import OnlineLearner
from tests.clicks import published
from tests.waiting import eventually
from tests.worker_process import WorkerProcess
from worker.checkpoint import load

BATCH = 64  # as tests.worker_process.BASE says
# Streams of whole mini-batches are learned to the last event; every vector that moved at all is published.
EXACT = {
    "redis__timeout_s": 0.5,
    "runtime__deterministic": "true",
    "publish__item_tolerance": 0,
    "publish__background_per_s": 3000,
    "checkpoint__every_s": 3600,
}
_OUTSTANDING = 8  # more than the updates that the publisher holds at once


def assert_redis_is_the_model(worker: WorkerProcess, client: Redis, users: Counter[str], items: Counter[str]) -> None:
    """Wait until everything is learned and published, stop the worker, and compare."""
    steps = users.total() // BATCH
    beat = f"{worker.prefix}:worker"
    eventually(lambda: int(client.hget(beat, "steps") or 0) == steps, 120, worker.describe)
    eventually(lambda: published(client, "user", worker.prefix) == dict(users), 120, worker.describe)
    newest = max(versions(client, worker.prefix))
    eventually(lambda: min(versions(client, worker.prefix)) > newest + _OUTSTANDING, 120, worker.describe)
    assert worker.stop() == 0
    assert published(client, "user", worker.prefix) == dict(users)
    assert published(client, "item", worker.prefix) == dict(items)
    learner = saved_learner(worker)
    rows = learner.users.lookup(list(users))
    assert_vectors(client, f"{worker.prefix}:user:", list(users), learner.user_vectors(rows))
    rows = learner.items.lookup(list(items))
    assert_vectors(client, f"{worker.prefix}:item:", list(items), learner.item_vectors()[rows])


def saved_learner(worker: WorkerProcess) -> OnlineLearner:
    """The learner of the worker's newest checkpoint."""
    saved, state = load(worker.checkpoints()[0].path)
    assert saved.header is not None
    learner = OnlineLearner(ModelConfig(**saved.header.model), torch.device("cpu"))
    learner.load(state["learner"])
    return learner


def saved_outbox(worker: WorkerProcess) -> dict[str, object]:
    """What the worker's newest checkpoint holds as still to be published or deleted."""
    return load(worker.checkpoints()[0].path)[1]["outbox"]


def assert_vectors(client: Redis, head: str, ids: list[str], vectors: np.ndarray) -> None:
    """One batch of users is not multiplied in the same order as another: the last digit may differ."""
    there = np.stack([np.frombuffer(client.hget(head + name, "vector"), "<f4") for name in ids])
    np.testing.assert_allclose(there, vectors, rtol=1e-4, atol=1e-5)


def versions(client: Redis, prefix: str = "rec") -> list[int]:
    """Of every published user."""
    keys = list(client.scan_iter(match=f"{prefix}:user:*", count=1000))
    with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.hget(key, "version")
        return [int(version or 0) for version in pipeline.execute()]


def positions(client: Redis, prefix: str = "rec") -> dict[str, dict[str, int]]:
    """What readers have seen, as the worker says."""
    return json.loads(client.hget(f"{prefix}:worker", "positions") or b"{}")
