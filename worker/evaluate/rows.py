"""The worker's own rows: its loop over the records, with something that looks on."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from model.batch import Int32, Int64, PastEvents
from model.learner import OnlineLearner, warm_up
from model.metrics import K
from worker.device import set_up_device
from worker.evaluate.dataset import EvaluationError
from worker.evaluate.measures import Measures
from worker.evaluate.stream import EventStream, Records
from worker.evaluate.variants import Variant
from worker.offline import offline_worker

Advance = Callable[[int], None]  # takes the number of events so far
Row = dict[str, Any]


class Onlooker:
    """A listener of the learner that measures; what that takes is not the worker's time."""

    top = K

    def __init__(self, stream: EventStream, learner: OnlineLearner, advance: Advance) -> None:
        self.measures = Measures(stream)
        self.seconds = 0.0
        self._stream, self._learner, self._advance = stream, learner, advance

    def ranked(self, events: PastEvents, ranks: Int64, popularity_ranks: Int64, top: Int32) -> None:  # noqa: ARG002
        """Measure events that were ranked. The learner counts events from 1, the stream from 0."""
        began = time.perf_counter()
        self.measures.add(events.sequence - 1, ranks, self._numbers(top))
        self._advance(int(events.sequence[-1]))
        self.seconds += time.perf_counter() - began

    def _numbers(self, rows: Int32) -> Int32:
        """The stream's numbers of the learner's item rows: those change hands when items are evicted."""
        found, inverse = np.unique(rows, return_inverse=True)
        ids, numbers = self._learner.items.ids, self._stream.numbers
        known = [-1 if (external := ids[row]) is None else numbers[external] for row in found.tolist()]
        return np.array(known, np.int32)[inverse].reshape(rows.shape)


def worker_row(variant: Variant, records: Records, stream: EventStream, advance: Advance) -> Row:
    """Run the worker's loop over the records; returns its row. EvaluationError where nothing was ranked."""
    settings = variant.settings
    warm_up(settings.model, set_up_device(settings.runtime))
    worker = offline_worker(settings, records)
    onlooker = Onlooker(stream, worker.learner, advance)
    worker.learner.listener = onlooker
    began = time.perf_counter()
    worker.run(drain=True)
    worker.learner.learn()  # what is left of the last mini-batch: a deterministic worker would keep it for later
    seconds = time.perf_counter() - began - onlooker.seconds
    found = onlooker.measures.report()
    if not found["events"]:
        raise EvaluationError(f"{variant.name}: no event was ranked; evaluation.share is {settings.evaluation.share}")
    shaping = {name: getattr(settings, name).model_dump(mode="json") for name in ("model", "events", "evaluation")}
    return {
        "family": settings.model.family,
        "name": variant.name,
        "kind": "freshet",
        "default": variant.default,
        "seed": settings.model.seed,
        "settings": shaping,
        "seconds": seconds,
        "events_per_s": worker.ingest.records / seconds,
        "device": str(worker.learner.device),
        **found,
    }
