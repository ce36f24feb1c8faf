"""The loop: what a worker does, over and over, until it is told to stop."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from model.learner import OnlineLearner
from worker.checkpoint import now_ms
from worker.dead_letter import DeadLetters
from worker.http import Health
from worker.ingest import Ingest
from worker.outbox import Outbox
from worker.publisher import Publisher
from worker.report import Report
from worker.saver import Saver
from worker.settings import Settings
from worker.source import Source, SourceError

_IDLE_S = 0.02  # longest wait for records: what else is due must not wait longer

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Worker:
    """The parts of a worker; app.py makes them."""

    settings: Settings
    source: Source
    ingest: Ingest
    learner: OnlineLearner
    outbox: Outbox
    publisher: Publisher
    dead_letters: DeadLetters
    saver: Saver
    health: Health
    report: Report
    stopping: threading.Event  # set by a signal; the loop ends after the turn it is in
    clock: Callable[[], float] = time.monotonic

    def run(self, *, drain: bool = False) -> None:
        """Turn until told to stop; with `drain`, until everything there was to read is learned and published."""
        waiting_since = self.clock()
        while not self.stopping.is_set():
            self.health.turn()
            if self.publisher.superseded_by is not None:
                self._stand_by()
                return
            # 1. read and observe; mini-batches are learned as they fill
            records = self.source.poll(_IDLE_S)
            if records is not None:
                self.outbox.mark(self.ingest.take(records))
            # 2. a mini-batch that does not fill does not wait for ever
            if not self.learner.pending or records is not None:
                waiting_since = self.clock()
            elif self._waited(waiting_since):
                self.learner.learn()
            # 3. publish, save, tell
            self._turn_outbox()
            self.saver.turn(self.clock())
            self.report.turn(self.clock())
            if drain and records is None and self._drained():
                return

    def stop(self) -> None:
        """Save, publish what is waiting, close; all within the grace setting. In this order:

        1. save: the filling mini-batch as it is; 2. publish; 3. the last report; 4. close.
        """
        deadline = self.clock() + self.settings.runtime.grace_s
        self.saver.save_now(deadline - self.clock())
        self.outbox.hurry()
        while self.publisher.connected and not self.outbox.settled and self.clock() < deadline:
            self._turn_outbox()
            self.stopping.wait(0) or time.sleep(0.005)
        self.report.last()
        self.publisher.close(max(0.5, min(5.0, deadline - self.clock())))
        self.dead_letters.close(max(0.5, min(5.0, deadline - self.clock())))
        self.source.close()
