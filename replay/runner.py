"""Sends what was chosen of a data set, at its pace, and says what became of it."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from replay.datasets import Dataset, DatasetError, Interaction, Item
from replay.pacing import Pacer
from replay.producer import DeliveryError, EventProducer
from replay.progress import Advance
from replay.stream import Selection
from worker.events import encode

_INTERRUPTED_FLUSH_S = 10.0


class Sink(Protocol):
    """Where events go: `EventProducer` sends them to Kafka, `LineWriter` writes them down."""

    @property
    def delivered(self) -> int:
        """Events that have arrived."""
        ...

    @property
    def next_number(self) -> int | None:
        """Number of the first event that has not arrived, if there is one."""
        ...

    def send(self, number: int, key: str, value: bytes) -> None:
        """Hand an event over. Raises DeliveryError."""
        ...

    def flush(self, timeout_s: float = ...) -> None:
        """Wait until everything has arrived. Raises DeliveryError."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What a replay did."""

    delivered: int  # acknowledged by Kafka
    elapsed_s: float
    interrupted: bool = False
    go_on_at: int | None = None  # number of the first interaction that is not acknowledged, if there is one
    error: str | None = None  # of the delivery

    @property
    def events_per_s(self) -> float:
        return self.delivered / self.elapsed_s if self.elapsed_s > 0 else 0.0


def replay(
    dataset: Dataset,
    selection: Selection,
    pacer: Pacer,
    producer: Sink,
    advance: Advance,
    event_type: str | None = None,
    watch: Callable[[Interaction], None] = lambda _: None,
) -> Outcome:
    """Send events until there are no more, one is not taken, or Ctrl-C; then wait for acknowledgements.

    `event_type` goes before the data set's own; without either it is `click`. `watch` is told of each event
    just before it is sent. Raises DatasetError for an interaction that the wire contract does not allow.
    """
    began = time.monotonic()
    interrupted, error, ended_at = False, None, selection.start
    try:
        for count, (number, event) in enumerate(selection.events(dataset), 1):
            ended_at = number
            value = _encoded(dataset, number, event, event_type)
            _wait(dataset, number, event, pacer)
            watch(event)
            producer.send(number, event.user, value)
            ended_at = number + 1
            advance(count)
        producer.flush()
    except KeyboardInterrupt:
        interrupted = True
        error = _last_flush(producer)
    except DeliveryError as failure:
        error = str(failure)
    elapsed_s = time.monotonic() - began
    unfinished = interrupted or error is not None
    go_on_at = producer.next_number if producer.next_number is not None else ended_at
    return Outcome(producer.delivered, elapsed_s, interrupted, go_on_at if unfinished else None, error)


def _encoded(dataset: Dataset, number: int, event: Interaction, event_type: str | None) -> bytes:
    try:
        return encode(
            event.user,
            event.item,
            event_type=event_type or event.event_type or "click",
            timestamp_ms=event.timestamp_ms,
            value=event.value,
            event_id=event.event_id,
        )
    except ValueError as error:
        raise DatasetError(f"{dataset.name}, interaction {number}: {error}") from error


def _wait(dataset: Dataset, number: int, event: Interaction, pacer: Pacer) -> None:
    try:
        pacer.wait(event.timestamp_ms)
    except ValueError as error:
        raise DatasetError(f"{dataset.name}, interaction {number}: {error}") from error


def _last_flush(producer: Sink) -> str | None:
    try:
        producer.flush(_INTERRUPTED_FLUSH_S)
    except DeliveryError as failure:
        return str(failure)
    return None


def send_items(items: Iterable[Item], producer: EventProducer, timestamp_ms: int) -> int:
    """Send descriptions, keyed by item id, as the wire contract has them; how many. Raises DeliveryError."""
    count = 0
    for count, item in enumerate(items, 1):
        producer.send(count, item.item_id, json.dumps(_described(item, timestamp_ms)).encode())
    producer.flush()
    return count


def _described(item: Item, timestamp_ms: int) -> dict[str, Any]:
    described = {"item_id": item.item_id, "title": item.title, "attributes": item.attributes}
    return described | {"available": True, "timestamp": timestamp_ms}
