"""`python -m worker forget USER…`: puts the event that erases a user into the stream, where the worker finds it."""

import uuid
from collections.abc import Sequence
from typing import Any, TextIO

from kafka import KafkaProducer
from kafka.errors import KafkaError, KafkaTimeoutError

from worker.events import encode_forget
from worker.kafka_client import CLOSE_S, client_options, close_within, open_client
from worker.settings import KafkaSettings, Settings, SettingsError

_LIMIT_MS = 10_000  # for the connection, and again for all deliveries
_PRODUCER = {
    "acks": "all",
    "enable_idempotence": False,  # a record that is written twice has one event id
    "max_in_flight_requests_per_connection": 1,
    "bootstrap_timeout_ms": _LIMIT_MS,
    "max_block_ms": _LIMIT_MS,
    "request_timeout_ms": _LIMIT_MS // 2,
    "delivery_timeout_ms": _LIMIT_MS,
}

_NEXT = """\
When the worker reads that far, each of them is gone from the model, its histories and Redis, and what was waiting with
it. A later click makes a new user.
The next checkpoint is without them. Older ones go by retention, or after the next save by
  python -m worker checkpoints prune --keep 1
Kafka's records, dead letters and copies of checkpoints stay as they are."""


def forget(settings: Settings, users: Sequence[str], topic: str | None, out: TextIO) -> int:
    """Send one event a user, keyed by it; say what became of each and what happens next. 2 when one is not written.

    Raises SettingsError for an id that no worker would take, SourceError for settings that cannot work.
    """
    topic = topic or settings.kafka.topics[0]
    values = [_value(user, settings.events.fields) for user in users]
    failed = False
    for user, result in zip(users, _sent(settings.kafka, topic, users, values), strict=True):
        failed |= isinstance(result, Exception)
        where = f"not written: {_reason(result, topic)}" if isinstance(result, Exception) else f"written to {result}"
        print(f"{user!r}: {where}", file=out)
    print("Not all of them are written; send those again." if failed else _NEXT, file=out)
    return 2 if failed else 0


def _value(user: str, fields: dict[str, str]) -> bytes:
    try:
        return encode_forget(user, event_id=uuid.uuid4().hex, fields=fields)
    except ValueError as error:
        raise SettingsError([f"user id {user[:40]!r} {error}"]) from None


def _sent(settings: KafkaSettings, topic: str, users: Sequence[str], values: Sequence[bytes]) -> list[str | Exception]:
    """Where each record is, or why it is nowhere."""
    try:
        # Kafka must not make a topic that nobody reads.
        producer, _ = open_client(
            KafkaProducer, {"allow_auto_create_topics": False}, **client_options(settings) | _PRODUCER
        )
    except (KafkaError, OSError) as error:
        return [error] * len(users)
    try:
        futures: list[Any] = []
        for user, value in zip(users, values, strict=True):
            futures.append(producer.send(topic, value, key=user.encode()))
        producer.flush(_LIMIT_MS / 1000 + 1)
    except (KafkaError, OSError, ValueError) as error:  # ValueError: no topic can have this name
        futures += [error] * (len(users) - len(futures))
    finally:
        close_within(lambda: producer.close(timeout=0), CLOSE_S)
    return [_outcome(future) for future in futures]


def _outcome(sent: Any) -> str | Exception:
    if isinstance(sent, Exception):
        return sent
    if not sent.is_done or sent.failed():
        return sent.exception or KafkaTimeoutError("not acknowledged in time")  # type: ignore[no-any-return]
    return f"{sent.value.topic}/{sent.value.partition} at offset {sent.value.offset}"


def _reason(error: Exception, topic: str) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text} (is there a topic {topic!r}, and may it be written?)"
