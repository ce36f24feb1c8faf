"""What being online is worth: the same model, trained at the end of each day and frozen by day.

By day its events are ranked and put aside; at night they are learned, in the same order and with the same settings as
the online model learns them. So both learn from the same events, and differ in when.
"""

import time
from typing import Any

import numpy as np
import torch

from model.batch import EventBatch, Int32, Int64, PastEvents
from model.config import ModelConfig
from model.learner import SCORED_AT_ONCE, OnlineLearner, warm_up
from model.popularity import Popularity
from worker.device import set_up_device
from worker.evaluate.dataset import EvaluationError
from worker.evaluate.rows import Advance, Onlooker, Row
from worker.evaluate.stream import EventStream
from worker.evaluate.variants import Variant

_DAY_MS = 86_400_000
FROZEN, FRESH = "nightly, histories of the night", "nightly, histories up to date"


class NightlyLearner(OnlineLearner):
    """A learner that learns at night. By day histories grow; whether they are used, `fresh` says."""

    def __init__(self, config: ModelConfig, device: torch.device, *, fresh: bool) -> None:
        super().__init__(config, device)
        self._fresh, self._night = fresh, False
        self._held: list[PastEvents] = []
        self._current = Popularity(config.popularity_half_life)  # the baseline's; the model's own waits for the night
        self._midnight = np.zeros(1, np.int64)  # by user row: clicks until the last midnight

    def learn(self) -> None:
        """By day: put the mini-batch aside."""
        events = self._pending.take()
        if rest := len(events) % SCORED_AT_ONCE:
            self._score(events.part(slice(len(events) - rest, None)), int(events.sequence[0]))
        if len(events):
            self._held.append(events)

    def sleep(self) -> None:
        """At night: learn the day, and begin another one."""
        self.learn()
        self._night = True
        for events in self._held:
            for first in range(0, len(events) - SCORED_AT_ONCE + 1, SCORED_AT_ONCE):
                self._score(events.part(slice(first, first + SCORED_AT_ONCE)), int(events.sequence[0]))
            self._pending.add(events)
            super().learn()
        self._night, self._held = False, []
        self._midnight = self.log.count.copy()
        self._current.load(self.popularity.state(self.items.rows))

    def _score(self, events: PastEvents, since: int, *, rank: bool = True, count: bool = True) -> None:
        """By day events are ranked and nothing is counted but the baseline's clicks, at night the other way round."""
        if self._night:
            super()._score(events, since, rank=False, count=count)
            return
        self._refresh_fusion(since)  # of last night, too
        of_last_night, self.popularity = self.popularity, self._current
        self._current.grow(self.items.rows)
        super()._score(events, since, rank=rank, count=False)
        self.popularity = of_last_night

    def _history(self, events: PastEvents) -> Int32:
        if self._night or self._fresh:
            return super()._history(events)
        known = np.where(events.users < len(self._midnight), events.users, 0)
        until = np.where(known > 0, self._midnight[known], 0)
        return self.log.window(events.users, np.minimum(events.positions, until), self.config.history)


def days(stream: EventStream) -> Int64:
    """Where each day of the stream begins, by event number, and its end. EvaluationError without a night."""
    day = np.maximum.accumulate(stream.times_ms) // _DAY_MS
    begins = np.flatnonzero(np.diff(day, prepend=day[0] - 1))
    if len(begins) < 2:
        raise EvaluationError("--nightly needs events with timestamps of more than a day (UTC)")
    return np.append(begins, len(stream))


def nightly_row(variant: Variant, stream: EventStream, advance: Advance, *, fresh: bool) -> Row:
    """Take the frozen model through the stream; returns its row."""
    device = set_up_device(variant.settings.runtime)
    warm_up(variant.settings.model, device)
    learner = NightlyLearner(variant.settings.model, device, fresh=fresh)
    onlooker = Onlooker(stream, learner, advance)
    learner.listener = onlooker
    bounds = days(stream)
    began = time.perf_counter()
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        learner.observe(batch_of(stream, first, last))
        learner.sleep()
    seconds = time.perf_counter() - began - onlooker.seconds
    model = variant.settings.model
    return {
        "family": model.family,
        "name": f"{variant.name}, {FRESH if fresh else FROZEN}",
        "kind": "nightly",
        "default": False,
        "seed": model.seed,
        "settings": {"model": model.model_dump(mode="json"), "fresh_histories": fresh, "nights": len(bounds) - 1},
        "seconds": seconds,
        "events_per_s": len(stream) / seconds,
        **onlooker.measures.report(),
    }


def batch_of(stream: EventStream, first: int, last: int) -> EventBatch:
    """Events `first` up to, not including, `last`, for a learner."""
    users = [stream.user_ids[user] for user in stream.users[first:last].tolist()]
    items = [stream.item_ids[item] for item in stream.items[first:last].tolist()]
    return EventBatch(users, items, stream.observe[first:last], stream.weights[first:last])


def uplift(online: Row, nightly: Row) -> dict[str, Any]:
    """How much more often the online model has the next item in its list, for all of the stream and its parts."""
    parts = zip(online["over_time"], nightly["over_time"], strict=True)
    return {
        "of": online["name"],
        "over": nightly["name"],
        "recall_at_10": _ratio(online["recall_at_10"], nightly["recall_at_10"]),
        "recall_at_10_last_half": _ratio(online["recall_at_10_last_half"], nightly["recall_at_10_last_half"]),
        "over_time": [
            {"until": a["until"], "recall_at_10": _ratio(a["recall_at_10"], b["recall_at_10"])} for a, b in parts
        ],
    }


def _ratio(a: float, b: float) -> float | None:
    return a / b - 1 if b > 0 else None
