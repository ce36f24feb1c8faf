"""Kafka as a source: partitions are assigned, and the positions are ours."""

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import structlog
from kafka import TopicPartition
from kafka.errors import (
    BrokerResponseError,
    CorruptRecordError,
    KafkaError,
    LogTruncationError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
    UnsupportedCompressionTypeError,
)

from worker.kafka_client import CLOSE_S, Opening, Throttle, close_within, one_line, open_consumer
from worker.kafka_offsets import KafkaOffsets
from worker.settings import KafkaSettings
from worker.source import Gap, Origin, Partition, Positions, SourceError, TopicIds

_LIMIT_MS = 2000  # of one question to the broker; it is asked again at a later poll
_RETRY_S = 1.0
_METADATA_RETRY_MS, _MISSING_RETRY_MS = 100, 500
_SILENT_AFTER_S = 5.0  # a broker that has not answered for this long is out of reach
_STUCK_MARGIN_S = 5.0  # beyond the limit of a request

log = structlog.get_logger(__name__)


class KafkaRecords:
    """The records of one poll, in columns."""

    __slots__ = ("_records", "timestamps_ms", "values")

    def __init__(self, records: list[Any]) -> None:
        self._records = records
        self.values: Sequence[bytes | None] = [record.value for record in records]
        self.timestamps_ms: Sequence[int] = [record.timestamp for record in records]

    def origin(self, index: int) -> Origin:
        """Record `index` whole."""
        record = self._records[index]
        partition = Partition(record.topic, record.partition)
        headers = tuple(record.headers or ())
        return Origin(partition, record.offset, record.timestamp, record.key, record.value, headers)

    def split(self, topic: str) -> "tuple[KafkaRecords | None, KafkaRecords | None]":
        """Those of other topics and those of `topic`, each in order."""
        those = [record for record in self._records if record.topic == topic]
        if not those:
            return self, None
        others = [record for record in self._records if record.topic != topic]
        return KafkaRecords(others) if others else None, KafkaRecords(those)


class KafkaSource:
    """Reads the topics of the settings; a `worker.source.Source` for one thread.

    Nothing is asked of the broker before the first poll. A broker that is away and a topic that is not there
    yet are waited for. Committed offsets are never read. After `reopen_after_s` without an answer the addresses
    of the brokers are asked for anew.
    """

    def __init__(self, settings: KafkaSettings, *, reopen_after_s: float = 15.0) -> None:
        self._settings, self._reopen_after_s = settings, reopen_after_s
        self._offsets = KafkaOffsets(settings, reopen_after_s)
        self._opening: Opening | None = None
        self._consumer: Any = None
        self._cluster: Any = None
        self._first_look: Any = None  # the Future of the first metadata that knows our topics
        self._positions: Positions = {}
        self._moved_s: dict[Partition, float] = {}  # of what is being read: when its position last changed
        self._known_topics: set[str] = set()  # a partition that appears in one of these is new
        self._absent_topics: set[str] = set()
        self._topic_ids: TopicIds = {}
        self._begun_anew: dict[Partition, float] = {}  # when; perhaps before the new id of its topic was seen
        self._failed_at: Positions = {}
        self._stopped: dict[Partition, str] = {}
        self._gaps: list[Gap] = []
        self._idle_s = 0.0  # spent waiting in poll since the last record
        self._retry_s = 0.0
        self._refused_s = float("-inf")  # when a poll last failed, and not because of a record
        self._closed = False
        self._may_log = Throttle()

    def seek(self, positions: Positions, topic_ids: TopicIds | None = None) -> None:
        """Read on from `positions`; see `worker.source.Source.seek`."""
        self._drop()
        for state in (self._absent_topics, self._begun_anew, self._failed_at, self._stopped):
            state.clear()
        self._positions, self._topic_ids = dict(positions), dict(topic_ids or {})
        self._known_topics = {partition.topic for partition in positions}

    def poll(self, timeout_s: float) -> KafkaRecords | None:
        """The next records, or None when none came in time.

        Raises SourceError for settings that cannot work, and for a gap when the settings say so.
        """
        began_s = time.monotonic()
        if began_s < self._retry_s or not self._opened(timeout_s):
            time.sleep(max(0.0, began_s + timeout_s - time.monotonic()))
            return None
        self._discover()
        try:
            left_s = max(0.0, began_s + timeout_s - time.monotonic())
            batches = self._consumer.poll(timeout_ms=left_s * 1000, max_records=self._settings.max_poll_records)
            moved = self._moved_by(batches)
        except Exception as error:
            self._failed(error)
            return None
        for partition, position in moved.items():
            self._move(partition, position)
        if not batches:
            self._idle(time.monotonic() - began_s)
            return None
        self._idle_s = 0.0
        self._offsets.answered()
        return KafkaRecords([record for batch in batches.values() for record in batch])

    def positions(self) -> Positions:
        """The next offset to read of every partition, also of those that are no longer there to be read."""
        return dict(self._positions)

    def topic_ids(self) -> TopicIds:
        """As Apache Kafka gives them, since 2.8; other brokers may know of none."""
        named = {partition.topic for partition in self._positions}
        return {topic: id_ for topic, id_ in self._topic_ids.items() if topic in named}

    def lag(self) -> dict[Partition, int]:
        """Offsets between the position and the end (of committed transactions, under read_committed)."""
        ends = {partition: self._offsets.end(partition) for partition in self._positions}
        return {at: max(0, end - self._positions[at]) for at, end in ends.items() if end is not None}

    @property
    def caught_up(self) -> bool:
        """True when all partitions that can be read were at their ends after the newest record had come."""
        return (
            bool(self._moved_s)
            and self.connected
            and all(self._offsets.reached(at, self._positions[at], moved_s) for at, moved_s in self._moved_s.items())
        )

    @property
    def stopped(self) -> Mapping[Partition, str]:
        """Partitions with a record that cannot be read, which are tried again at the next start, and those whose
        broker is silent while others answer.
        """
        return self._stopped | dict.fromkeys(self._silent(), "its broker does not answer")

    def take_gaps(self) -> list[Gap]:
        """The gaps that were found since the last call."""
        gaps, self._gaps = self._gaps, []
        return gaps

    def commit(self, positions: Positions) -> None:
        """Have the group's offsets committed, for lag dashboards; only those that grow."""
        self._offsets.commit(positions)

    def rewind(self, positions: Positions) -> None:
        """Have the group's offsets committed as they are in an older checkpoint that had to be used."""
        log.warning("positions_rewound", positions={f"{topic}[{n}]": at for (topic, n), at in positions.items()})
        self._offsets.commit(positions, back=True)

    @property
    def exhausted(self) -> bool:
        """Never: a topic has no end."""
        return False

    @property
    def connected(self) -> bool:
        """Whether all topics are there, and the broker has answered in the last seconds and refused nothing."""
        return (
            self._consumer is not None
            and bool(self._moved_s)
            and not self._absent_topics
            and time.monotonic() - self._refused_s > _SILENT_AFTER_S
            and self._offsets.answered_within(_SILENT_AFTER_S)
        )

    def close(self) -> None:
        """Commit what is still to be committed and close the connections, within some seconds."""
        if not self._closed:
            self._closed = True
            self._offsets.close(CLOSE_S)
            self._drop()

    # ---- the consumer

    def _opened(self, timeout_s: float) -> bool:
        if self._consumer is not None or self._closed:
            return not self._closed
        settings = self._settings
        if self._opening is None:
            options = {"group_id": None, "fetch_max_wait_ms": settings.fetch_max_wait_ms}
            self._opening = Opening(lambda: open_consumer(settings, **options))
        try:
            opened = self._opening.wait(timeout_s)
        except (KafkaError, OSError) as error:
            self._opening = None
            self._weather("kafka_out_of_reach", error)
            return False
        if opened is None:
            return False
        self._opening, (self._consumer, self._cluster, self._first_look) = None, opened
        self._idle_s = 0.0
        self._offsets.answered()
        log.info("kafka_connected", servers=settings.bootstrap_servers, topics=settings.all_topics)
        return True

    def _drop(self) -> None:
        """Give the consumer up; the next poll opens another one and reads on from the positions."""
        self._moved_s.clear()
        if self._opening is not None:
            self._opening.give_up(lambda opened: close_within(opened[0].close, CLOSE_S))
            self._opening = None
        if self._consumer is not None:
            close_within(self._consumer.close, CLOSE_S)
            self._consumer = None

    def _weather(self, event: str, error: Exception) -> None:
        self._retry_s = time.monotonic() + _RETRY_S
        if self._may_log(event):
            log.warning(event, servers=self._settings.bootstrap_servers, error=one_line(error))

    def _idle(self, waited_s: float) -> None:
        """A poll brought nothing. A reader that has lost its broker, or is stuck, is replaced."""
        self._idle_s += waited_s
        silent = not self._offsets.answered_within(self._reopen_after_s)
        limit_s = self._settings.request_timeout_ms / 1000 + _STUCK_MARGIN_S
        stuck = self._idle_s > limit_s and any(lag for at, lag in self.lag().items() if at in self._moved_s)
        if self._moved_s and (silent or stuck):
            log.warning("kafka_reader_replaced", why="no answer" if silent else "there are records, but none come")
            self._drop()

    def _silent(self) -> list[Partition]:
        limit_s = time.monotonic() - self._reopen_after_s
        heard_s = {at: max(moved_s, self._offsets.asked_s(at)) for at, moved_s in self._moved_s.items()}
        return [at for at, last_s in heard_s.items() if last_s < limit_s] if self.connected else []

    # ---- partitions

    def _discover(self) -> None:
        """Begin to read the partitions that have appeared, and notice topics that are gone or made anew."""
        for topic in self._settings.all_topics:
            numbers = self._cluster.partitions_for_topic(topic)
            if numbers is None:
                self._missing(topic)
                continue
            try:
                self._identify(topic, numbers)
                self._assign([Partition(topic, number) for number in sorted(numbers)])
            except (KafkaError, KeyError) as error:  # KeyError: an offset is missing from the broker's answer
                self._weather("kafka_offsets_not_known", error)
        # kafka-python asks again for a topic that is missing; ten times a second is too often for a long wait.
        self._cluster.config["retry_backoff_ms"] = _MISSING_RETRY_MS if self._absent_topics else _METADATA_RETRY_MS

    def _missing(self, topic: str) -> None:
        if not self._looked():
            return
        self._known_topics.add(topic)
        if self._may_log(f"missing {topic}"):
            refused = topic in self._cluster.unauthorized_topics
            log.warning("topic_not_there", topic=topic, why="not authorized" if refused else "waiting for it")
        if topic not in self._absent_topics:
            self._absent_topics.add(topic)
            self._watch()
            # Should it be made anew, nothing may be read at an old position.
            self._consumer.pause(*(TopicPartition(*at) for at in self._moved_s if at.topic == topic))

    def _looked(self) -> bool:
        """Whether the broker has said which of our topics are there."""
        look = self._first_look
        if look.is_done and look.failed() and not isinstance(look.exception, UnknownTopicOrPartitionError):
            self._first_look = self._cluster.request_update()
            return False
        return bool(look.is_done)

    def _identify(self, topic: str, numbers: set[int]) -> None:
        """A topic is there. Is it the one that the positions belong to?"""
        new_id, old_id = _known(self._cluster.topic_id(topic)), self._topic_ids.get(topic)
        if new_id is not None:
            if old_id not in (None, new_id):
                self._made_anew(topic, numbers)
            self._topic_ids[topic] = new_id
        if topic in self._absent_topics:
            self._absent_topics.discard(topic)
            self._watch()
            self._consumer.resume(*(TopicPartition(*at) for at in self._moved_s if at.topic == topic))
            log.info("topic_there", topic=topic)

    def _made_anew(self, topic: str, numbers: set[int]) -> None:
        """Nothing that is known of its partitions holds any longer. Raises KafkaError, KeyError."""
        ours = [partition for partition in self._positions if partition.topic == topic]
        there = [partition for partition in ours if partition.partition in numbers]
        seen_s = time.monotonic() - self._settings.metadata_max_age_ms / 1000 - _SILENT_AFTER_S
        self._begin_anew([at for at in there if self._begun_anew.get(at, float("-inf")) < seen_s])
        for partition in ours:
            for known in (self._begun_anew, self._failed_at, self._stopped):
                known.pop(partition, None)
        if gone := set(ours) - set(there):
            for partition in gone:
                del self._positions[partition]
                self._moved_s.pop(partition, None)
            self._consumer.assign([TopicPartition(*partition) for partition in self._moved_s])
            self._watch()

    def _assign(self, partitions: list[Partition]) -> None:
        new = [at for at in partitions if at not in self._moved_s and at not in self._stopped]
        if not new:
            return
        unknown = [partition for partition in new if partition not in self._positions]
        self._positions |= self._starts(unknown)
        self._moved_s |= dict.fromkeys(new, time.monotonic())
        self._known_topics |= {partition.topic for partition in new}
        self._consumer.assign([TopicPartition(*partition) for partition in self._moved_s])
        for partition in new:
            self._consumer.seek(TopicPartition(*partition), self._positions[partition])
            log.info("reading", **partition._asdict(), position=self._positions[partition])
        self._watch()

    def _watch(self) -> None:
        self._offsets.watch(frozenset(at for at in self._moved_s if at.topic not in self._absent_topics))

    def _starts(self, partitions: list[Partition]) -> Positions:
        """Where partitions of one topic are begun that have no position yet. Raises KafkaError, KeyError."""
        if not partitions:
            return {}
        start, topic = self._settings.start, partitions[0].topic
        new = topic in self._known_topics
        if topic == self._settings.items_topic:  # what is known of the items does not begin at a time
            start = "earliest"
        if start == "earliest" or (start == "latest" and new):
            return self._beginnings(partitions)
        return self._ends(partitions) if start == "latest" else self._at_time(partitions, _milliseconds(start))

    def _at_time(self, partitions: list[Partition], time_ms: int) -> Positions:
        ends = self._ends(partitions)  # first: what comes meanwhile may be after the time
        times = {TopicPartition(*partition): time_ms for partition in partitions}
        found = self._consumer.offsets_for_times(times, timeout_ms=_LIMIT_MS)
        return ends | {Partition(*at): first.offset for at, first in found.items() if first is not None}

    def _beginnings(self, partitions: Iterable[Partition]) -> Positions:
        asked = [TopicPartition(*partition) for partition in partitions]
        found = self._consumer.beginning_offsets(asked, timeout_ms=_LIMIT_MS) if asked else {}
        return {Partition(*at): offset for at, offset in found.items()}

    def _ends(self, partitions: Iterable[Partition]) -> Positions:
        asked = [TopicPartition(*partition) for partition in partitions]
        found = self._consumer.end_offsets(asked, timeout_ms=_LIMIT_MS) if asked else {}
        return {Partition(*at): offset for at, offset in found.items()}

    # ---- positions

    def _moved_by(self, batches: dict[TopicPartition, list[Any]]) -> Positions:
        if batches:
            return {Partition(*at): records[-1].offset + 1 for at, records in batches.items()}
        # Without records a position moves past the markers of transactions. timeout 0: nothing is asked.
        moved = {at: self._consumer.position(TopicPartition(*at), timeout_ms=0) for at in self._moved_s}
        return {at: position for at, position in moved.items() if position is not None}

    def _move(self, partition: Partition, position: int) -> None:
        if position != self._positions[partition]:
            self._positions[partition] = position
            if partition in self._moved_s:
                self._moved_s[partition] = time.monotonic()

    # ---- what can go wrong

    def _failed(self, error: Exception) -> None:
        try:
            if isinstance(error, OffsetOutOfRangeError):
                self._out_of_range([Partition(*at) for at in error.args[0]])
            elif isinstance(error, LogTruncationError):
                self._truncated(error.divergent_offsets)
            elif _blames_a_record(error):
                self._unreadable(error)
            else:
                self._refused_s = time.monotonic()
                self._weather("kafka_read_failed", error)
        except (KafkaError, KeyError) as second:
            self._weather("kafka_offsets_not_known", second)

    def _out_of_range(self, partitions: list[Partition]) -> None:
        beginnings, ends = self._beginnings(partitions), self._ends(partitions)
        outside = [at for at in partitions if not beginnings[at] <= self._positions[at] <= ends[at]]
        for partition in outside:
            self._gap(partition, beginnings[partition])

    def _truncated(self, divergent: dict[TopicPartition, Any]) -> None:
        """Records that had been read are gone from the log, and others stand in their place."""
        self._begin_anew([Partition(*at) for at, where in divergent.items() if where is None])
        for at, where in divergent.items():
            if where is not None:
                self._gap(Partition(*at), where.offset)

    def _begin_anew(self, partitions: list[Partition]) -> None:
        for partition, beginning in self._beginnings(partitions).items():
            if beginning != self._positions[partition]:
                self._gap(partition, beginning)

    def _gap(self, partition: Partition, found: int) -> None:
        """Go on at `found`, or stop, as the settings say; loudly either way."""
        gap = Gap(partition, self._positions[partition], found)
        told = {**partition._asdict(), "expected": gap.expected, "found": found, "lost": gap.lost}
        if self._settings.on_gap == "stop":
            raise SourceError(f"{_gap_text(gap)}; kafka.on_gap=continue goes on from there")
        log.error("gap", **told)
        self._gaps.append(gap)
        if found < gap.expected:
            self._begun_anew[partition] = time.monotonic()
        if partition in self._moved_s:
            self._consumer.seek(TopicPartition(*partition), found)
        self._move(partition, found)

    def _unreadable(self, error: Exception) -> None:
        """Read on with a new consumer; a partition that fails twice at the same place is stopped."""
        partition, text = self._culprit(), one_line(error)
        self._drop()  # this one may never get past the record, and without an error
        if partition is None:
            self._weather("kafka_read_failed", error)
            return
        told = {**partition._asdict(), "offset": self._positions[partition], "error": text}
        if self._failed_at.get(partition) == self._positions[partition]:
            self._stopped[partition] = text
            log.error("partition_stopped", **told)
        else:
            self._failed_at[partition] = self._positions[partition]
            log.warning("record_unreadable", **told, then="read once more")

    def _culprit(self) -> Partition | None:
        # kafka-python's errors do not say where they happened; it was where the reader is now.
        reading = self._consumer._fetcher._next_partition_records
        return Partition(*reading.topic_partition) if reading is not None else None


def _blames_a_record(error: Exception) -> bool:
    """Whether the error says that a record cannot be read, rather than that the broker cannot or will not serve."""
    if isinstance(error, BrokerResponseError):
        return isinstance(error, CorruptRecordError | UnsupportedCompressionTypeError)
    return not (isinstance(error, KafkaError) and error.retriable)


def _known(topic_id: UUID | None) -> str | None:
    return str(topic_id) if topic_id is not None and topic_id.int else None


def _gap_text(gap: Gap) -> str:
    text = f"{gap.partition.topic}[{gap.partition.partition}] should go on at offset {gap.expected}, but "
    if gap.found < gap.expected:
        return f"{text}the topic was made anew or its log was cut back, and goes on at {gap.found}"
    return f"{text}the log has it only from {gap.found} on ({gap.lost} lost)"


def _milliseconds(text: str) -> int:
    time_of = datetime.fromisoformat(text)
    return max(0, int((time_of if time_of.tzinfo else time_of.replace(tzinfo=UTC)).timestamp() * 1000))
