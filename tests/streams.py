"""Small streams with a known structure, for the model's tests."""

import numpy as np

from model.batch import EventBatch
from model.config import ModelConfig

SMALL = {"dim": 8, "history": 6, "seen_items": 8, "batch_size": 16, "negatives": 16, "replay_mean_age": 64}


def small_config(**changes: object) -> ModelConfig:
    """A model that learns in milliseconds."""
    return ModelConfig(**(SMALL | changes))  # type: ignore[arg-type]


def clustered(events: int, seed: int = 0, users: int = 60, items: int = 80, clusters: int = 4) -> EventBatch:
    """Each user clicks within its own cluster of items, nine times out of ten."""
    rng = np.random.default_rng(seed)
    who = rng.integers(0, users, events)
    own = rng.random(events) < 0.9
    cluster = np.where(own, who % clusters, rng.integers(0, clusters, events))
    what = rng.integers(0, items // clusters, events) * clusters + cluster
    return batch([f"u{i}" for i in who], [f"i{i}" for i in what])


def batch(users: list[str], items: list[str], weights: list[float] | None = None) -> EventBatch:
    """Observed events, of weight 1 unless given."""
    given = np.ones(len(users)) if weights is None else np.array(weights)
    return EventBatch(users, items, np.ones(len(users), np.bool_), given.astype(np.float32))


def differences(a: object, b: object, where: str = "") -> list[str]:
    """Paths at which two states are not the same bits."""
    if isinstance(a, dict) and isinstance(b, dict):
        odd = [f"{where}/{key}" for key in a.keys() ^ b.keys()]
        return odd + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for n, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}/{n}")]
    if hasattr(a, "numpy") and hasattr(b, "numpy"):
        x, y = a.numpy(), b.numpy()
        return [] if x.shape == y.shape and x.tobytes() == y.tobytes() else [where]
    return [] if type(a) is type(b) and a == b else [where]
