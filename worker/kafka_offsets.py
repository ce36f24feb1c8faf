"""What is known of a topic beside its records: where it ends, and how far a group has come."""

import threading
import time
from collections.abc import Callable
from typing import Any

import structlog
from kafka import TopicPartition
from kafka.structs import OffsetAndMetadata

from worker.kafka_client import CLOSE_S, Throttle, close_within, one_line, open_consumer
from worker.settings import KafkaSettings
from worker.source import Partition, Positions

_EVERY_S = 1.0
_PAUSE_S = 0.02
_LIMIT_MS = 2000  # of one question; a broker that does not answer is asked again

log = structlog.get_logger(__name__)


class KafkaOffsets:
    """Asks for the ends of partitions and commits positions, in a thread with a client of its own.

    So neither can hold up reading, and reading does not need the group's coordinator. One thread commits, and
    always the newest positions: an old commit is never sent again after a newer one.
    """

    def __init__(self, settings: KafkaSettings, reopen_after_s: float) -> None:
        self._settings, self._reopen_after_s = settings, reopen_after_s
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._hurry = self._closing = False
        self._partitions: frozenset[Partition] = frozenset()
        self._ends: dict[Partition, tuple[int, float]] = {}  # the end, and when it was asked for
        self._wanted: Positions = {}  # committed, or to be committed where dirty
        self._dirty: set[Partition] = set()
        self._answered_s = float("-inf")
        self._consumer: Any = None
        self._cluster: Any = None
        self._may_log = Throttle()

    def watch(self, partitions: frozenset[Partition]) -> None:
        """Keep asking for the ends of these, and commit for these only."""
        with self._wake:
            self._partitions = partitions
            self._ask_now()

    def end(self, partition: Partition) -> int | None:
        """The newest known end that readers may see."""
        known = self._ends.get(partition)
        return known and known[0]

    def reached(self, partition: Partition, position: int, since_s: float) -> bool:
        """Whether `position` is the end, asked for after `since_s` (monotonic). Asks again if that is not known."""
        end, asked_s = self._ends.get(partition, (0, float("-inf")))
        if position < end:
            return False
        if asked_s <= since_s:
            with self._wake:
                self._ask_now()
        return asked_s > since_s

    def asked_s(self, partition: Partition) -> float:
        """When its newest known end was asked for (monotonic)."""
        return self._ends.get(partition, (0, float("-inf")))[1]

    def answered_within(self, seconds: float) -> bool:
        """Whether the broker has been heard of in the last `seconds`."""
        return time.monotonic() - self._answered_s <= seconds

    def answered(self) -> None:
        """The broker has just been heard of by somebody else."""
        self._answered_s = time.monotonic()

    def commit(self, positions: Positions, *, back: bool = False) -> None:
        """Have committed what has grown in `positions`; with `back` what has shrunk, too."""
        with self._wake:
            for partition, position in positions.items():
                known = self._wanted.get(partition)
                if known is None or position > known or (back and position < known):
                    self._wanted[partition] = position
                    self._dirty.add(partition)
            if self._dirty:
                self._ask_now()

    def close(self, timeout_s: float) -> None:
        """Commit what is still to be committed and end, within `timeout_s`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _ask_now(self) -> None:
        self._hurry = True
        self._wake.notify()
        if self._thread is None and not self._closing and self._partitions:
            self._thread = threading.Thread(target=self._run, name="kafka-offsets", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        working_s = time.monotonic()
        while not self._closing:
            worked = all([self._turn(self._ask), self._turn(self._send)])  # neither waits for the other's luck
            if worked:
                working_s = time.monotonic()
            elif time.monotonic() - working_s > self._reopen_after_s:
                self._drop()
                working_s = time.monotonic()
            with self._wake:
                # Not without a break: many would like to know at once whether they have reached the end.
                self._wake.wait_for(lambda: self._closing, _PAUSE_S)
                self._hurry = self._hurry and worked
                self._wake.wait_for(lambda: self._closing or self._hurry, _EVERY_S)
                self._hurry = False
        self._turn(self._send)
        self._drop()

    def _turn(self, step: Callable[[], None]) -> bool:
        try:
            if self._consumer is None:
                group_id = self._settings.group_id or None
                self._consumer, self._cluster, _ = open_consumer(self._settings, group_id=group_id)
            step()
        except Exception as error:
            # Weather, or a group that somebody else uses: told, and tried again.
            name = step.__name__.strip("_")
            if self._may_log(name):
                log.warning("kafka_offsets_failed", step=name, error=one_line(error))
            return False
        return True

    def _ask(self) -> None:
        """Leader by leader: one that is silent must not hide the ends that others know. Raises the last failure."""
        failed: Exception | None = None
        for asked in self._by_leader():
            asked_s = time.monotonic()
            try:
                ends = self._consumer.end_offsets(asked, timeout_ms=_LIMIT_MS)
            except Exception as error:
                failed = error
                continue
            self._ends |= {Partition(*at): (end, asked_s) for at, end in ends.items()}
            self._answered_s = time.monotonic()
        if failed is not None:
            raise failed

    def _by_leader(self) -> list[list[TopicPartition]]:
        found: dict[Any, list[TopicPartition]] = {}
        for partition in self._partitions:
            at = TopicPartition(*partition)
            found.setdefault(self._cluster.leader_for_partition(at), []).append(at)
        return list(found.values())

    def _send(self) -> None:
        with self._wake:
            batch = {at: self._wanted[at] for at in self._dirty & self._partitions}
        if not batch or not self._settings.group_id:
            return
        offsets = {TopicPartition(*at): OffsetAndMetadata(position, "", -1) for at, position in batch.items()}
        self._consumer.commit(offsets, timeout_ms=_LIMIT_MS)
        with self._wake:
            self._dirty -= {at for at, position in batch.items() if self._wanted[at] == position}

    def _drop(self) -> None:
        if self._consumer is not None:
            close_within(self._consumer.close, CLOSE_S)
            self._consumer = None
