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
from worker.report import Report
from worker.saver import Saves
from worker.settings import RuntimeSettings
from worker.source import Source
from worker.updates import Publishes

_IDLE_S = 0.02  # longest wait for records: what else is due must not wait longer
_STAND_BY_S = 0.2
_CLOSE_S = 2.0  # each part's share of the grace for giving back what it holds

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Worker:
    """The parts of a worker, put together in app.py."""

    settings: RuntimeSettings
    source: Source
    ingest: Ingest
    learner: OnlineLearner
    outbox: Outbox
    publisher: Publishes
    dead_letters: DeadLetters
    saver: Saves
    report: Report
    health: Health
    stopping: threading.Event  # set by a signal; the loop ends after the turn it is in
    clock: Callable[[], float] = time.monotonic

    def run(self, *, drain: bool = False) -> None:
        """Turn until told to stop; with `drain`, until everything there is to read is learned and published."""
        filling_since = self.clock()
        while not self.stopping.is_set() and self.publisher.superseded_by is None:
            self.health.turn()
            # 1. read and observe; what was touched is handed over before a mini-batch that it fills is learned
            records = self.source.poll(_IDLE_S)
            if records is not None:
                for taken in self.ingest.take(records):
                    self.outbox.mark(taken)
                    if self.outbox.live:  # the positions are those after the whole poll: not caught up before that
                        self._publish()
            # 2. a mini-batch that does not fill does not wait for ever
            if records is not None or not self.learner.pending:
                filling_since = self.clock()
            elif self._waited_long(filling_since):
                self.learner.learn()
            # 3. publish, save, tell
            self._publish()
            self.saver.turn(self.clock())
            self.report.turn(self.clock())
            if drain and records is None and self._drained():
                return
        if self.publisher.superseded_by is not None:
            self._stand_by()

    def stop(self) -> None:
        """Within the grace setting, in this order: save, the filling mini-batch as it is; publish; close."""
        deadline = self.clock() + self.settings.grace_s
        self.saver.save_now(self.settings.grace_s / 2, self.clock())
        self.outbox.hurry()
        self._publish_the_rest(deadline)
        self.report.log("stopped")
        # What cannot be published now is in the checkpoint.
        self.publisher.close(max(_CLOSE_S, deadline - self.clock()) if self.publisher.connected else _CLOSE_S)
        self.dead_letters.close(_CLOSE_S)
        self.source.close()
        self.saver.close(max(0.0, deadline - self.clock()))

    def _publish_the_rest(self, deadline: float) -> None:
        """Hand everything over that waits, unless readers have seen more than this model has, or Redis is away."""
        connected_s = self.clock()
        self._publish()
        while self.outbox.live and not self.outbox.settled and self.publisher.superseded_by is None:
            if self.clock() > min(deadline, connected_s + 2 * _CLOSE_S) - _CLOSE_S:
                return
            time.sleep(0.002)
            connected_s = self.clock() if self.publisher.connected else connected_s
            self._publish()

    def _publish(self) -> None:
        ended = not self.outbox.live and self._at_end()
        self.outbox.turn(self.clock(), now_ms(), self.source.positions(), self.report.figures, ended)

    def _waited_long(self, since_s: float) -> bool:
        limit_ms = 0 if self.settings.deterministic else self.settings.max_wait_ms
        return 0 < limit_ms <= 1000 * (self.clock() - since_s)

    def _at_end(self) -> bool:
        return self.source.exhausted or self.source.caught_up

    def _drained(self) -> bool:
        if not self._at_end():
            return False
        if not self.settings.deterministic:
            self.learner.learn()
        return not self.publisher.connected or not self.outbox.backlog

    def _stand_by(self) -> None:
        """A newer worker has taken over: stay up, say so, touch nothing. A restart loop of two would be worse."""
        log.error("superseded", by_epoch=self.publisher.superseded_by, own_epoch=self.publisher.epoch)
        while not self.stopping.wait(_STAND_BY_S):
            self.health.turn()
            self.report.turn(self.clock())
