"""Publishing to Redis from a thread of its own: the loop hands finished columns over and never waits.

Order inside one turn of the thread:
1. claim the prefix (at the start, and again when Redis has lost the claim);
2. a step of the sweep, if one is due;
3. one call for the next waiting update;
4. if nothing waits: once a heartbeat, look whether the claim is still there.
An update stays the next one until Redis has acknowledged all of it, so every call may be repeated.
"""

import threading
import time
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError, TimeoutError

from worker.publish_queue import PublishQueue, Task
from worker.redis_client import connect, describe, error_kind
from worker.redis_writer import ClaimLostError, PrefixConflictError, RedisWriter, SupersededError
from worker.settings import PublishSettings, RedisSettings
from worker.telemetry import Telemetry
from worker.updates import (
    Ack,
    Heartbeat,
    ItemVectors,
    Meta,
    Popular,
    Removed,
    Update,
    UserVectors,
    check_update,
)

__all__ = [
    "Ack",
    "Heartbeat",
    "ItemVectors",
    "Meta",
    "Popular",
    "Publisher",
    "Removed",
    "Update",
    "UserVectors",
    "wall_clock_ms",
]

# A call that runs into its time limit is halved, so that a slow line gets through, and grows again by the least.
_CALL_BYTES, _LEAST_CALL_BYTES = 4 << 20, 64 << 10
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.05, 1.0
_SWEEP_KEYS, _SWEEP_PAUSE_S = 1000, 0.1  # looked at in one step, and the time between two

log = structlog.get_logger(__name__)


def wall_clock_ms() -> int:
    """Milliseconds since the epoch, UTC."""
    return time.time_ns() // 1_000_000


class Publisher:
    """One worker's writes. The methods are the loop's; only the thread, or `turn`, talks to Redis.

    `checkpoint_epoch` is the epoch in the checkpoint (0 = none). `replace` lets this worker take over a
    prefix under which vectors of another dim or family were published.
    """

    def __init__(
        self,
        redis: RedisSettings,
        publish: PublishSettings,
        meta: Meta,
        *,
        checkpoint_epoch: int = 0,
        replace: bool = False,
        telemetry: Telemetry | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._client = connect(redis)
        self._writer = RedisWriter(self._client, redis, publish, meta, now_ms)
        self._telemetry = telemetry or Telemetry()
        self._heartbeat_s, self._dim = publish.heartbeat_s, meta.dim
        self._checkpoint_epoch, self._replace = checkpoint_epoch, replace
        self._now_ms = now_ms
        self._queue = PublishQueue(publish.max_users)
        self._sweep = _Sweep()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._closing = False
        self._stopped = threading.Event()
        # Written by the thread, read by anyone.
        self._seen_positions: bytes | None = None
        self._claim_lost = False
        self._loss = False
        self._failure: tuple[str, str] | None = None  # kind and text, of the last call
        self._end: SupersededError | PrefixConflictError | None = None  # why there will be no more calls
        # The thread's own.
        self._failures = 0
        self._call_bytes = _CALL_BYTES
        self._next_watch = 0.0

    # ---- the loop's side

    def start(self) -> None:
        """Start the thread. It claims as soon as Redis can be reached."""
        self._thread.start()

    @property
    def epoch(self) -> int | None:
        """The epoch of this worker's claim; None until it has claimed."""
        return None if self._seen_positions is None else self._writer.epoch

    @property
    def seen_positions(self) -> bytes | None:
        """What readers had seen when this worker claimed (JSON; b"" = nothing); None until it has claimed.

        The loop catches up to these before it hands over any vectors.
        """
        return self._seen_positions

    @property
    def connected(self) -> bool:
        """The claim was made, nobody else has taken over, and the last call was answered as it should be."""
        return self.epoch is not None and self._end is None and self._failure is None

    @property
    def superseded_by(self) -> int | None:
        """The epoch of the newer worker that has taken over, for good."""
        return self._end.epoch if isinstance(self._end, SupersededError) else None

    @property
    def conflict(self) -> str | None:
        """What is wrong with the prefix, for good: vectors of another kind are published under it."""
        return str(self._end) if isinstance(self._end, PrefixConflictError) else None

    @property
    def problem(self) -> str | None:
        """Why nothing is being published now, in one line without secrets; None when all is well."""
        if self._end is not None:
            return str(self._end)
        if (failure := self._failure) is not None:
            return failure[1]
        if self.epoch is None:
            return "not claimed yet"
        return "Redis has lost this worker's claim; it is being claimed again" if self._claim_lost else None

    @property
    def backlog(self) -> int:
        """Rows that were handed over and are not in Redis yet."""
        return self._queue.rows()

    def take_loss(self) -> bool:
        """True once after Redis lost what it had acknowledged: everything has to be published again."""
        if not self._loss:  # never cleared unseen: the thread may set it at any time
            return False
        self._loss = False
        return True

    def ready_for(self, kind: type[Update]) -> bool:
        """Whether an update of this kind may be handed over now. Always False before the claim."""
        claimed = self.epoch is not None and self._end is None
        return claimed and not self._closing and self._queue.has_room(kind)

    def submit(self, update: Update) -> None:
        """Hand an update over; its columns belong to the publisher from here on.

        Raises ValueError for columns that do not fit, RuntimeError when not `ready_for` it. Once
        another worker has taken over, updates go nowhere.
        """
        check_update(update, self._dim)
        if self._end is not None:
            return
        if not self.ready_for(type(update)):
            raise RuntimeError(f"not ready for {type(update).__name__}")
        self._queue.add(update)

    def acknowledged(self) -> list[Ack]:
        """The updates that Redis has acknowledged since the last call, oldest first; makes room for new ones."""
        return self._queue.collect()

    def sweep(self, version: int = 0) -> None:
        """Delete, in the background, the users and items that only older epochs wrote, or this one before `version`.

        Begins when everything that was handed over before is in Redis.
        """
        self._sweep.request(version, after=self._queue.added)
        self._queue.wake()

    @property
    def sweeping(self) -> bool:
        return self._sweep.wanted

    def close(self, timeout_s: float) -> bool:
        """Wait until everything handed over is acknowledged, then stop; both within `timeout_s`.

        Returns whether all of it was acknowledged; `acknowledged` may still be asked.
        """
        deadline = time.monotonic() + timeout_s
        self._closing = True
        if self._thread.is_alive():
            self._queue.wait(lambda: self._end is not None or self._queue.empty, timeout_s)
        self._stopped.set()
        self._queue.wake()
        self._join(deadline)
        return self._queue.empty

    def _join(self, deadline: float) -> None:
        if self._thread.is_alive():
            self._thread.join(min(0.1, max(0.0, deadline - time.monotonic())))
        # a call that hangs ends when its socket does
        self._client.connection_pool.disconnect()
        if self._thread.is_alive():
            self._thread.join(max(0.1, deadline - time.monotonic()))

    # ---- the thread's side

    def _run(self) -> None:
        while not self._stopped.is_set() and self._end is None:
            wait_s = self.turn()
            if self._failures:
                self._stopped.wait(wait_s)
            else:
                self._queue.wait(self._has_work, wait_s)
        self._client.close()

    def _has_work(self) -> bool:
        waits = not self._queue.empty or self._sweep.due(self._queue)
        return self._stopped.is_set() or (waits and not self._claim_lost)

    def turn(self) -> float:
        """Do the next thing there is to do; returns the seconds after which the next turn makes sense.

        Only for the thread, or in its place.
        """
        try:
            wait_s = self._work()
        except (SupersededError, PrefixConflictError) as end:
            return self._ended(end)
        except ClaimLostError:
            log.warning("Redis has lost this worker's claim or what it had acknowledged", epoch=self.epoch)
            self._claim_lost = True
            return 0.0
        except (RedisError, OSError) as error:
            return self._failed(error)
        except Exception as error:
            # a fault of ours is visible and does not end publishing
            if not self._stopped.is_set():
                log.exception("publishing failed")
            return self._failed(error)
        self._succeeded()
        return wait_s

    def _work(self) -> float:
        if self.epoch is None:
            self._claim()
        if self._claim_lost and not self._claim_again():
            return self._heartbeat_s
        if self._sweep.due(self._queue):
            self._sweep.step(self._writer)
        if (task := self._queue.next()) is not None:
            self._send(task)
            return 0.0
        if time.monotonic() >= self._next_watch:
            self._writer.watch()
            self._next_watch = time.monotonic() + self._heartbeat_s
        return max(0.0, min(self._next_watch - time.monotonic(), self._sweep.wait_s))

    def _claim(self) -> None:
        least = max(self._checkpoint_epoch, self._now_ms())
        seen = self._writer.claim(least, self._replace)
        self._telemetry.epoch.set(self._writer.epoch)
        log.info("claimed", epoch=self._writer.epoch, seen_positions=seen.decode())
        self._seen_positions = seen

    def _claim_again(self) -> bool:
        if not self._writer.reclaim():
            return False
        log.warning("claimed again; everything is to be published again", epoch=self.epoch)
        self._claim_lost, self._loss = False, True
        self._sweep.restart()
        return True

    def _send(self, task: Task) -> None:
        try:
            task.send(self._writer, self._call_bytes)
        except TimeoutError:
            self._call_bytes = max(_LEAST_CALL_BYTES, min(self._call_bytes, task.left_bytes) // 2)
            raise
        self._queue.sent()
        self._call_bytes = min(_CALL_BYTES, self._call_bytes + _LEAST_CALL_BYTES)
        self._next_watch = time.monotonic() + self._heartbeat_s
        if task.done:
            ack = Ack(task.update, self._now_ms(), task.refused, task.skipped)
            self._count(ack)
            self._queue.done(ack)

    def _count(self, ack: Ack) -> None:
        update, telemetry = ack.update, self._telemetry
        telemetry.publish_refused.inc(ack.refused)
        if isinstance(update, UserVectors | ItemVectors):
            table = "users" if isinstance(update, UserVectors) else "items"
            telemetry.published.labels(table).inc(len(update.ids) - ack.refused - ack.skipped)
            telemetry.nonfinite_vectors.labels(table).inc(ack.skipped)
        if isinstance(update, UserVectors):
            telemetry.observe_freshness(ack.acked_ms - update.event_times_ms)

    def _ended(self, end: SupersededError | PrefixConflictError) -> float:
        log.error("publishing has ended", reason=str(end), epoch=self.epoch)
        self._end = end
        self._queue.wake()
        return 0.0

    def _failed(self, error: Exception) -> float:
        kind, text = error_kind(error), describe(error)
        self._telemetry.publish_errors.labels(kind).inc()
        if self._failure is None or self._failure[0] != kind:
            log.warning("Redis cannot be written", kind=kind, error=text)
        self._failure = kind, text
        self._failures += 1
        # a fresh connection finds the new master behind a name, and no late reply of an old call
        self._client.connection_pool.disconnect()
        self._sweep.restart()
        return min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(self._failures - 1, 16))

    def _succeeded(self) -> None:
        if self._failure is not None:
            log.info("Redis can be written again", after=self._failure[0], failures=self._failures)
        self._failure, self._failures = None, 0


class _Sweep:
    """Looks at every key under the prefix in small steps. A cursor does not outlive its connection."""

    def __init__(self) -> None:
        self._requested = self._served = self._serving = 0  # passes over all keys
        self._version = 0
        self._after = 0  # how many updates must be done first
        self._cursor = self._deleted = 0
        self._next = 0.0

    def request(self, version: int, after: int) -> None:
        self._version, self._after = version, after
        self._requested += 1

    @property
    def wanted(self) -> bool:
        return self._requested > self._served

    def due(self, queue: PublishQueue) -> bool:
        return self.wanted and time.monotonic() >= self._next and queue.all_done(self._after)

    @property
    def wait_s(self) -> float:
        """Seconds until the next step."""
        return self._next - time.monotonic() if self.wanted else float("inf")

    def step(self, writer: RedisWriter) -> None:
        if self._cursor == 0:
            self._serving = self._requested
        self._cursor, deleted = writer.sweep(self._cursor, _SWEEP_KEYS, self._version)
        self._deleted += deleted
        self._next = time.monotonic() + _SWEEP_PAUSE_S
        if self._cursor == 0:
            log.info("swept", deleted=self._deleted)
            self._served, self._deleted = self._serving, 0

    def restart(self) -> None:
        self._cursor = 0
