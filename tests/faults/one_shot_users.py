"""Ten million users who click once and never again, through the fast path of a learner that holds 200,000.

    python -m tests.faults.one_shot_users EVENTS EVERY

Prints one JSON line after each EVERY events: {"events", "users", "log_entries", "rss_mb"}.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from model.batch import EventBatch
from model.config import ModelConfig
from model.learner import OnlineLearner

CAPACITY = 200_000
POLL = 5000


def cheap() -> ModelConfig:
    """Steps so seldom and small that the tables are what is measured."""
    sizes = {"dim": 8, "history": 4, "seen_items": 8, "negatives": 16, "replay": 0, "replay_mean_age": 1000}
    return ModelConfig(**sizes, user_capacity=CAPACITY, item_capacity=50_000, batch_size=16_384)  # type: ignore[arg-type]


def rss_mb() -> float:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return round(int(status.partition("VmRSS:")[2].split()[0]) / 1024, 1)


def main() -> None:
    """Each event has a user of its own; items repeat, and slowly change."""
    events, every = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    learner = OnlineLearner(cheap(), torch.device("cpu"), ranked_share=0.0)
    observe, weights = np.ones(POLL, np.bool_), np.ones(POLL, np.float32)
    for start in range(0, events, POLL):
        users = [f"visitor-{n:09d}-of-a-day" for n in range(start, start + POLL)]
        items = [f"item-{start // 1000 + n % 1000}" for n in range(POLL)]
        learner.observe(EventBatch(users, items, observe, weights))
        if (start + POLL) % every == 0:
            figures = {
                "events": learner.events,
                "users": len(learner.users),
                "log_entries": len(learner.log.arena),
                "rss_mb": rss_mb(),
            }
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
