"""When to save, and saving beside the loop: the state is copied at one moment and written by a thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Protocol

import structlog

from worker.checkpoint import CheckpointFolder, Header, Saved
from worker.dead_letter import DeadLetters
from worker.settings import CheckpointSettings
from worker.source import Source

Snapshot = tuple[dict[str, Any], Header]
_FLUSH_S = 2.0  # longest wait for rejected records to reach their topic before a save
_RETRY_S = 10.0  # after a failed save, at most
_HANGS_S = 30.0  # a save that takes this long is told

log = structlog.get_logger(__name__)


class Saves(Protocol):
    """What the loop wants of whoever saves."""

    saves: int  # of this run
    failures: int
    problem: str | None  # why the newest save failed
    newest: Saved | None
    seconds: float  # that the newest save took

    def turn(self, now_s: float) -> None: ...

    def save_now(self, timeout_s: float, now_s: float) -> bool: ...

    def close(self, timeout_s: float) -> bool: ...


class Saver:
    """Saves periodically and at the stop. In this order, so that a crash anywhere loses and doubles nothing:

    1. rejected records reach their topic (bounded: what cannot be written must not hold the checkpoint up);
    2. the state is copied, with the positions that belong to it; 3. a thread writes the file;
    4. the positions of a file that is safely there are committed to the source, unless a newer worker has taken over:
       the group's offsets are that one's now.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        settings: CheckpointSettings,
        snapshot: Callable[[], Snapshot],
        changes: Callable[[], int],  # grows with what a new checkpoint would hold and the newest does not
        source: Source,
        dead_letters: DeadLetters,
        superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder, self._settings, self._snapshot, self._changes = folder, settings, snapshot, changes
        self._source, self._dead_letters, self._superseded = source, dead_letters, superseded
        self._running: Future[Saved] | None = None
        self._saved = self._saving = changes()  # in the newest checkpoint, and in the one that is being written
        self._last_s: float | None = None  # when the newest save began
        self._not_before_s = 0.0
        self._first_wanted = False
        self.saves = self.failures = 0  # of this run
        self.problem: str | None = None  # why the newest save failed
        self.newest: Saved | None = None
        self.seconds = 0.0  # from the beginning of the newest save to its end

    def save_when_positions_are_known(self) -> None:
        """A fresh start and a rollback save at once: a crash before the next save must neither go back to another model
        nor, where reading began at the end or at a time, begin anywhere else.
        """
        self._first_wanted = True

    def turn(self, now_s: float) -> None:
        """Finish a save that is written; begin one that is due."""
        if self._last_s is None:
            self._last_s = now_s
        if self._running is not None:
            if self._running.done():
                self._finish(now_s)
            elif now_s - self._last_s >= _HANGS_S:
                self.problem = f"a checkpoint is being written for over {_HANGS_S:g} s: the disk is slow, or hangs"
        elif self._due(now_s):
            self._begin(now_s)

    def save_now(self, timeout_s: float, now_s: float) -> bool:
        """Save what is there, waiting that long, or twice that where a save had begun; False when it failed."""
        if not self._waited(timeout_s, now_s):
            return False
        if self._changes() != self._saved:
            self._begin(now_s)
        return self._waited(timeout_s, now_s) and self.problem is None

    def _waited(self, timeout_s: float, now_s: float) -> bool:
        """Whether no save is being written any more."""
        if self._running is None:
            return True
        if not wait_for([self._running], timeout_s).done:
            log.error("checkpoint_not_finished", timeout_s=timeout_s)
            return False
        self._finish(now_s)
        return True

    def close(self, timeout_s: float) -> bool:
        """A save that is being written is waited for; False when it takes longer: a disk may hang for ever.

        What it leaves is no checkpoint, and is cleaned up by the next start.
        """
        running, self._running = self._running, None
        if running is None or wait_for([running], timeout_s).done:
            return True
        log.error("checkpoint_given_up", timeout_s=timeout_s)
        return False

    def _due(self, now_s: float) -> bool:
        if self._first_wanted and self._source.positions():
            self._first_wanted = False
            return True
        new = self._changes() - self._saved
        waited = now_s - (self._last_s or 0.0) >= self._settings.every_s
        return now_s >= self._not_before_s and (new >= self._settings.every_events or (new > 0 and waited))

    def _begin(self, now_s: float) -> None:
        self._dead_letters.flush(_FLUSH_S)
        self._saving = self._changes()
        state, header = self._snapshot()
        self._last_s = now_s
        self._running = _begun(lambda: self._folder.save(state, header))

    def _finish(self, now_s: float) -> None:
        assert self._running is not None  # noqa: S101
        done, self._running = self._running, None
        try:
            saved = done.result()
        except OSError as error:
            self.failures += 1
            self.problem = f"the checkpoint could not be written: {error}"
            self._not_before_s = now_s + min(_RETRY_S, self._settings.every_s)
            log.error("checkpoint_failed", problem=self.problem)
            return
        assert saved.header is not None  # noqa: S101
        self.seconds = now_s - (self._last_s or now_s)
        self.saves, self.problem, self.newest = self.saves + 1, None, saved
        self._saved = self._saving
        log.info("checkpoint_saved", path=str(saved.path), bytes=saved.bytes, records=saved.header.records)
        if not self._superseded():
            self._source.commit(saved.header.positions_by_partition())


def _begun(save: Callable[[], Saved]) -> Future[Saved]:
    """In a thread that does not keep the process from ending, should the disk never answer."""
    saved: Future[Saved] = Future()

    def run() -> None:
        try:
            saved.set_result(save())
        except BaseException as error:
            saved.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return saved
