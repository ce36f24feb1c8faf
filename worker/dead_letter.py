"""Rejected records go to a topic of their own, with the reason, so that nobody has to search for them."""

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import structlog
from kafka import KafkaProducer
from kafka.errors import KafkaError, MessageSizeTooLargeError

from worker.events import Reason
from worker.kafka_client import CLOSE_S, Throttle, client_options, close_within, one_line, open_client
from worker.settings import KafkaSettings
from worker.source import Origin, Partition

_BATCH = 500
_MAX_BUFFER_BYTES = 64 * 2**20
_MAX_VALUE_BYTES = 900_000  # what a broker takes by default is a little over a million
_SHORT_BYTES = 200  # of a value that the broker would not take longer
_RETRY_S = 1.0
_DELIVERY_MS = 10_000
_PRODUCER = {
    "acks": "all",
    # An idempotent producer of kafka-python is lost for good once the broker has refused one record as too large.
    "enable_idempotence": False,
    "max_in_flight_requests_per_connection": 1,  # in order all the same
    "linger_ms": 5,
    "max_block_ms": 2000,
    "request_timeout_ms": 5000,
    "delivery_timeout_ms": _DELIVERY_MS,
}

log = structlog.get_logger(__name__)


class DeadLetters(Protocol):
    """Where rejected records go."""

    def send(self, origin: Origin, reason: Reason, detail: str) -> None:
        """Take one rejected record. Never blocks, never raises."""
        ...

    @property
    def pending(self) -> int:
        """Records that have been taken and are not known to be written yet."""
        ...

    @property
    def dropped(self) -> int:
        """Records whose payload was given up."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was taken is written. False when that took too long, or cannot be now."""
        ...

    def close(self, timeout_s: float) -> None:
        """Write what can be written in time, and end."""
        ...


class NoDeadLetters:
    """Rejected records are only counted."""

    pending = dropped = 0

    def send(self, origin: Origin, reason: Reason, detail: str) -> None:
        """Nothing."""

    def flush(self, timeout_s: float) -> bool:  # noqa: ARG002
        """There is nothing to wait for."""
        return True

    def close(self, timeout_s: float) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class _Letter:
    origin: Origin
    reason: Reason
    detail: str
    short: bool = False

    @property
    def size_bytes(self) -> int:
        return len(self.origin.key or b"") + len(self.origin.value or b"") + 200

    def parts(self) -> tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]:
        """Key, value and headers of the dead letter; what does not fit is cut, and a header says so."""
        origin, limit = self.origin, _SHORT_BYTES if self.short else _MAX_VALUE_BYTES
        value, key = origin.value or b"", origin.key
        kept = [] if self.short else [(name, content or b"") for name, content in origin.headers]
        ours = {
            "freshet-reason": self.reason,
            "freshet-detail": self.detail,
            "freshet-topic": origin.partition.topic,
            "freshet-partition": origin.partition.partition,
            "freshet-offset": origin.offset,
            "freshet-timestamp": origin.timestamp_ms,
        }
        if self.short or len(value) > limit:
            ours["freshet-truncated"] = len(value)
        headers = kept + [(name, str(content).encode()) for name, content in ours.items()]
        return (key and key[:limit] if self.short else key), value[:limit], headers


class KafkaDeadLetters:
    """Writes to `<topic><suffix>`, from a thread of its own, so that the loop never waits for Kafka.

    A record is written at least once while its topic can be written. While it cannot, records wait in a
    bounded buffer and are tried again; past the buffer the payload is dropped and counted, and its origin is
    logged. `flush` before a checkpoint makes sure that a crash after it loses no dead letter. It does not wait
    for a topic that cannot be written: then a crash loses the payloads in the buffer, not the counts.

    The topic is not made here; a broker that makes topics by itself makes this one, too.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._change = threading.Condition()
        self._letters: deque[_Letter] = deque()
        self._bytes = 0
        self._failing = self._closing = self._ended = False
        self._dropped = 0
        self._untold: dict[Partition, list[int]] = {}  # first and last offset that was dropped, and how many
        self._producer: Any = None
        self._thread: threading.Thread | None = None
        self._may_log = Throttle()

    @property
    def pending(self) -> int:
        """Records that have been taken and are not known to be written yet."""
        return len(self._letters)

    @property
    def dropped(self) -> int:
        """Records whose payload was given up."""
        return self._dropped

    def send(self, origin: Origin, reason: Reason, detail: str) -> None:
        """Take one rejected record."""
        if not self._settings.dead_letter_suffix:
            return
        letter = _Letter(origin, reason, detail)
        with self._change:
            full = len(self._letters) >= self._settings.dead_letter_buffer
            if full or self._bytes + letter.size_bytes > _MAX_BUFFER_BYTES or self._closing:
                self._drop(letter)
                return
            self._letters.append(letter)
            self._bytes += letter.size_bytes
            self._change.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dead-letters", daemon=True)
                self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written; not for a topic that has just refused."""
        with self._change:
            self._change.wait_for(lambda: not self._letters or self._failing, timeout_s)
            return not self._letters

    def close(self, timeout_s: float) -> None:
        """Write what can be written in time; the origins of the rest are logged."""
        self.flush(timeout_s)
        with self._change:
            self._closing = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        with self._change:
            self._ended = True
            while self._letters:
                self._drop(self._letters.popleft())
            self._tell()

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._letters or self._closing)
                batch = list(islice(self._letters, _BATCH))
                if self._closing:
                    break
            self._settle(batch, self._write(batch))
            if self._failing:
                with self._change:
                    self._change.wait_for(lambda: self._closing, _RETRY_S)
        self._give_up_producer()

    def _write(self, batch: list[_Letter]) -> list[Exception | None]:
        """What became of each letter: None when it is written."""
        try:
            if self._producer is None:
                options = client_options(self._settings) | _PRODUCER
                self._producer, _ = open_client(KafkaProducer, {}, **options)
        except Exception as error:
            return [error] * len(batch)
        refused: dict[str, Exception] = {}
        sent = [self._hand_over(letter, refused) for letter in batch]
        with suppress(KafkaError):
            self._producer.flush(_DELIVERY_MS / 1000 + 1)
        outcomes = [_outcome(future) for future in sent]
        if any(error is not None and _is_weather(error) for error in outcomes):
            self._give_up_producer()  # with what it still holds: that is sent again
        return outcomes

    def _hand_over(self, letter: _Letter, refused: dict[str, Exception]) -> Any:
        """The Future of a letter, or why there is none. `refused`: topics that are not asked for again."""
        topic = letter.origin.partition.topic + self._settings.dead_letter_suffix
        if topic in refused:
            return refused[topic]
        key, value, headers = letter.parts()
        try:
            sent = self._producer.send(topic, value=value, key=key, headers=headers)
            error = sent.exception if sent.is_done else None
        except Exception as failure:
            sent = error = failure
        if error is not None and _is_weather(error):  # the topic is not there, or not ours to write
            refused[topic] = error
        return sent

    def _settle(self, batch: list[_Letter], outcomes: list[Exception | None]) -> None:
        """Take off the buffer what is written; what never will be is tried once more in short, then dropped."""
        again, lost = [], []
        for letter, error in zip(batch, outcomes, strict=True):
            if error is None:
                continue
            if _is_weather(error):
                again.append(letter)
            elif letter.short:
                lost.append(letter)
            else:
                again.append(replace(letter, short=True))
        with self._change:
            if self._ended:
                return
            for _ in batch:
                self._bytes -= self._letters.popleft().size_bytes
            self._letters.extendleft(reversed(again))
            self._bytes += sum(letter.size_bytes for letter in again)
            for letter in lost:
                self._drop(letter)
            self._tell()
            self._failing = any(error is not None and _is_weather(error) for error in outcomes)
            self._change.notify_all()
        self._report(outcomes)

    def _report(self, outcomes: Iterable[Exception | None]) -> None:
        error = next((error for error in outcomes if error is not None), None)
        if error is not None and self._may_log("failed"):
            log.warning("dead_letters_not_written", error=one_line(error), pending=self.pending)

    def _drop(self, letter: _Letter) -> None:
        self._dropped += 1
        offset = letter.origin.offset
        told = self._untold.setdefault(letter.origin.partition, [offset, offset, 0])
        told[0], told[1], told[2] = min(told[0], offset), max(told[1], offset), told[2] + 1

    def _tell(self) -> None:
        for (topic, partition), (first, last, count) in self._untold.items():
            where = {"topic": topic, "partition": partition, "first_offset": first, "last_offset": last}
            log.error("dead_letters_dropped", **where, records=count)
        self._untold.clear()

    def _give_up_producer(self) -> None:
        if self._producer is not None:
            producer, self._producer = self._producer, None
            close_within(lambda: producer.close(timeout=0), CLOSE_S)


def _outcome(sent: Any) -> Exception | None:
    if isinstance(sent, Exception):
        return sent
    if not sent.is_done:
        return TimeoutError("not acknowledged in time")
    return None if sent.succeeded() else sent.exception


def _is_weather(error: Exception) -> bool:
    """Whether trying again as it is may help; otherwise it is the letter that is wrong."""
    return isinstance(error, KafkaError | OSError) and not isinstance(error, MessageSizeTooLargeError)
