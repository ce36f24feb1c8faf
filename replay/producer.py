"""Sends records to Kafka: acknowledged by all replicas, idempotent, every outcome counted."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self

from kafka import KafkaProducer
from kafka.errors import KafkaError
from kafka.partitioner.default import murmur2

from replay.kafka_client import BOOTSTRAP_TIMEOUT_MS, unavailable

_LINGER_MS = 5
_BATCH_BYTES = 65_536
_DELIVERY_TIMEOUT_MS = 120_000  # a broker may be restarted meanwhile
_REQUEST_TIMEOUT_MS = 20_000
MAX_PENDING = 20_000  # records that may wait for their acknowledgement; then sending waits

_MAX_REMEMBERED = 1_000_000  # keys whose partition is kept


class DeliveryError(Exception):
    """Kafka did not take a record within the time it was given."""


class EventProducer:
    """A producer that knows what became of each record.

    Records with one key go to one partition, in order. Each carries a number of the caller's, so that the
    caller can be told where to go on after a failure.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        compression: str | None = "lz4",
        **client_options: Any,
    ) -> None:
        """Connect, within ten seconds; KafkaUnavailableError if that fails or the topic is not there.

        `client_options` go to kafka-python (security, time limits).
        """
        self.topic = topic
        self.delivered = 0  # acknowledged
        self.failed = 0
        self.first_failed: int | None = None  # the number of the first record that was not taken
        self._first_error: Exception | None = None
        self._pending: deque[tuple[int, Any]] = deque()
        self._producer = _connect(bootstrap_servers, compression, client_options)
        try:
            self._partitions = len(self._producer.partitions_for(topic))
        except (KafkaError, OSError) as error:
            _close(self._producer)
            raise unavailable(bootstrap_servers, error) from error
        self._partition_of: dict[str, int] = {}

    @property
    def pending(self) -> int:
        """Records that have been handed over, but not acknowledged yet."""
        return len(self._pending)

    @property
    def next_number(self) -> int | None:
        """The number of the first record that is not acknowledged; None if all are."""
        waiting = self._pending[0][0] if self._pending else None
        known = [number for number in (self.first_failed, waiting) if number is not None]
        return min(known, default=None)

    def send(self, number: int, key: str, value: bytes) -> None:
        """Hand one record over; waits while too many are on their way.

        The record's timestamp is the time of this call. Raises DeliveryError once a record has failed:
        to go on would break the order that the data set has.
        """
        key_bytes = key.encode()
        try:
            future = self._producer.send(self.topic, value, key_bytes, partition=self._partition(key, key_bytes))
        except (KafkaError, OSError) as error:
            self._fail(number, error)
        else:
            self._pending.append((number, future))
        self._collect()
        if len(self._pending) >= MAX_PENDING:
            self._wait_for_oldest()
        self._raise_failure()

    def _partition(self, key: str, key_bytes: bytes) -> int:
        """Kafka's own choice for a key; remembered, since it costs more than all the rest of a send."""
        partition = self._partition_of.get(key)
        if partition is None:
            partition = (murmur2(key_bytes) & 0x7FFFFFFF) % self._partitions
            if len(self._partition_of) < _MAX_REMEMBERED:
                self._partition_of[key] = partition
        return partition

    def flush(self, timeout_s: float = _DELIVERY_TIMEOUT_MS / 1000) -> None:
        """Wait until every record is acknowledged; DeliveryError if one fails or is not in time."""
        try:
            self._producer.flush(timeout=timeout_s)
        except KafkaError as error:
            self._first_error = self._first_error or error
        self._collect()
        self._raise_failure()
        if self._pending:
            raise DeliveryError(f"{len(self._pending)} records are not acknowledged after {timeout_s:g} s")

    def _collect(self) -> None:
        pending = self._pending
        while pending and pending[0][1].is_done:
            number, future = pending.popleft()
            if future.failed():
                self._fail(number, future.exception)
            else:
                self.delivered += 1

    def _wait_for_oldest(self) -> None:
        try:
            self._pending[0][1].get(timeout=_DELIVERY_TIMEOUT_MS / 1000 + 10)
        except KafkaError as error:
            self._first_error = self._first_error or error
        self._collect()

    def _fail(self, number: int, error: Exception) -> None:
        self.failed += 1
        self._first_error = self._first_error or error
        if self.first_failed is None or number < self.first_failed:
            self.first_failed = number

    def _raise_failure(self) -> None:
        if self.failed:
            text = " ".join(str(self._first_error).split())[:300]
            raise DeliveryError(f"Kafka did not take {self.failed} records: {text}")

    def close(self) -> None:
        """Let go of the connection; what is not acknowledged by then is not waited for."""
        _close(self._producer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _connect(bootstrap_servers: str, compression: str | None, client_options: dict[str, Any]) -> Any:
    options: dict[str, Any] = {
        "acks": "all",
        "enable_idempotence": True,
        "compression_type": compression,
        "linger_ms": _LINGER_MS,
        "batch_size": _BATCH_BYTES,
        "max_block_ms": BOOTSTRAP_TIMEOUT_MS,
        "bootstrap_timeout_ms": BOOTSTRAP_TIMEOUT_MS,
        "delivery_timeout_ms": _DELIVERY_TIMEOUT_MS,
        "request_timeout_ms": _REQUEST_TIMEOUT_MS,
        "reconnect_backoff_max_ms": 1000,
        "metrics_enabled": False,
    }
    make = partial(KafkaProducer, bootstrap_servers=bootstrap_servers.split(","), **options | client_options)
    try:
        # kafka-python connects in the calling thread, and a Ctrl-C that meets it there is lost in one of its
        # coroutines; it reaches a thread that only waits
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make).result()
    except (KafkaError, OSError, ValueError) as error:
        raise unavailable(bootstrap_servers, error) from error


def _close(producer: Any) -> None:
    try:
        producer.close(timeout=1)
    except KafkaError:
        # records are still waiting; its destructor would try again and print the failure
        producer._closed = True
