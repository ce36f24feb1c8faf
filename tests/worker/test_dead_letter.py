"""Rejected records reach their topic with the reason, and never hold the loop up."""

from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from kafka import KafkaConsumer, TopicPartition

from replay.local_stack import Broker, create_topic
from tests.waiting import eventually
from worker.dead_letter import KafkaDeadLetters, NoDeadLetters
from worker.events import Reason
from worker.settings import KafkaSettings
from worker.source import Origin, Partition

SUFFIX = ".rejected"


def origin(topic: str, offset: int, value: bytes = b"{", **fields: Any) -> Origin:
    return Origin(
        **{"partition": Partition(topic, 3), "offset": offset, "timestamp_ms": 99, "key": b"k"} | fields, value=value
    )


def written(broker: Broker, topic: str, count: int) -> list[Any]:
    """The first `count` records of the dead-letter topic, which has no more."""
    consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="none")
    at = TopicPartition(topic + SUFFIX, 0)
    consumer.assign([at])
    consumer.seek(at, 0)
    records: list[Any] = []

    def all_there() -> bool:
        records.extend(consumer.poll(100).get(at, ()))
        return len(records) >= count

    try:
        eventually(all_there, what=lambda: f"{count} dead letters; there are {len(records)}")
        assert consumer.end_offsets([at]) == {at: count}
    finally:
        consumer.close()
    return records


class Letters:
    """Dead letters to the topics of one broker, closed after the test."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.opened: list[KafkaDeadLetters] = []

    def __call__(self, **settings: Any) -> KafkaDeadLetters:
        settings = {"bootstrap_servers": self.broker.bootstrap_servers, "dead_letter_suffix": SUFFIX} | settings
        self.opened.append(KafkaDeadLetters(KafkaSettings(**settings)))
        return self.opened[-1]

    def close(self) -> None:
        for letters in self.opened:
            letters.close(0)


@pytest.fixture
def letters(broker: Broker, topic: str) -> Iterator[Letters]:
    create_topic(broker.bootstrap_servers, topic + SUFFIX)
    letters = Letters(broker)
    yield letters
    letters.close()


@pytest.fixture
def own_topic(breakable_broker: Broker, request: pytest.FixtureRequest) -> str:
    topic = f"own-{abs(hash(request.node.nodeid))}"
    create_topic(breakable_broker.bootstrap_servers, topic + SUFFIX)
    return topic


@pytest.fixture
def own_letters(breakable_broker: Broker) -> Iterator[Letters]:
    letters = Letters(breakable_broker)
    yield letters
    letters.close()


def flushed(letters: KafkaDeadLetters) -> None:
    eventually(lambda: letters.flush(1), 60, lambda: f"flushed; {letters.pending} pending")
    assert letters.pending == 0


@pytest.mark.integration
def test_a_dead_letter_is_the_record_with_its_origin_and_reason_in_headers(
    letters: Letters, broker: Broker, topic: str
) -> None:
    dead = letters()
    headers = (("trace", b"\x00\xff"), ("empty", None), ("trace", b"again"))
    dead.send(origin(topic, 17, b"\xff{", headers=headers), Reason.NOT_UTF8, "größer (byte 0)")
    flushed(dead)
    [record] = written(broker, topic, 1)
    assert (record.key, record.value) == (b"k", b"\xff{")
    assert record.headers == [
        ("trace", b"\x00\xff"),
        ("empty", b""),
        ("trace", b"again"),
        ("freshet-reason", b"not_utf8"),
        ("freshet-detail", "größer (byte 0)".encode()),
        ("freshet-topic", topic.encode()),
        ("freshet-partition", b"3"),
        ("freshet-offset", b"17"),
        ("freshet-timestamp", b"99"),
    ]


@pytest.mark.integration
def test_many_dead_letters_are_each_written_once_and_in_order(letters: Letters, broker: Broker, topic: str) -> None:
    dead = letters()
    for n in range(2000):
        dead.send(origin(topic, n, b"%d" % n, key=None), Reason.NOT_JSON, "no")
    flushed(dead)
    assert [record.value for record in written(broker, topic, 2000)] == [b"%d" % n for n in range(2000)]
    assert dead.dropped == 0


@pytest.mark.integration
def test_what_is_longer_than_a_broker_takes_is_cut_and_a_header_says_so(
    letters: Letters, broker: Broker, topic: str
) -> None:
    dead = letters()
    dead.send(origin(topic, 1, b"x" * 3_000_000), Reason.TOO_LARGE, "long")
    dead.send(origin(topic, 2, b"", key=b"k" * 2_000_000, headers=(("h", b"v"),)), Reason.NOT_JSON, "a long key")
    flushed(dead)
    first, second = written(broker, topic, 2)
    assert first.value == b"x" * 900_000
    assert ("freshet-truncated", b"3000000") in first.headers
    assert (second.key, second.value) == (b"k" * 200, b"")
    assert dict(second.headers)["freshet-offset"] == b"2"
    assert dead.dropped == 0


@pytest.mark.integration
@pytest.mark.apache_kafka
def test_what_the_topic_does_not_take_is_written_in_short(letters: Letters, broker: Broker, topic: str) -> None:
    small = topic + "-small"
    create_topic(broker.bootstrap_servers, small + SUFFIX, configs={"max.message.bytes": "2000"})
    dead = letters()
    dead.send(origin(small, 1, b"x" * 50_000), Reason.NOT_JSON, "no")
    dead.send(origin(small, 2, b"short"), Reason.NOT_JSON, "no")
    flushed(dead)
    by_offset = {dict(record.headers)["freshet-offset"]: record.value for record in written(broker, small, 2)}
    assert by_offset == {b"1": b"x" * 200, b"2": b"short"}
    assert dead.dropped == 0


@pytest.mark.integration
@pytest.mark.apache_kafka
def test_letters_wait_for_a_topic_that_is_not_there_without_holding_a_flush_up(
    letters: Letters, broker: Broker, topic: str
) -> None:
    missing = topic + "-missing"
    dead = letters()
    dead.send(origin(missing, 1), Reason.NOT_JSON, "no")
    assert not dead.flush(30)  # returns as soon as the topic has been refused once
    assert not dead.flush(30)
    assert dead.pending == 1
    create_topic(broker.bootstrap_servers, missing + SUFFIX)
    dead.send(origin(missing, 2), Reason.NOT_JSON, "no")
    flushed(dead)
    records = written(broker, missing, 2)
    assert [dict(record.headers)["freshet-offset"] for record in records] == [b"1", b"2"]


@pytest.mark.integration
def test_letters_wait_in_a_bounded_buffer_while_the_broker_is_away(
    own_letters: Letters, breakable_broker: Broker, own_topic: str
) -> None:
    breakable_broker.stop()
    dead = own_letters(dead_letter_buffer=5)
    with structlog.testing.capture_logs() as logs:
        for offset in range(100, 108):
            dead.send(origin(own_topic, offset), Reason.NOT_JSON, "no")
        assert (dead.pending, dead.dropped) == (5, 3)
        assert not dead.flush(30)
        told = eventually(lambda: [line for line in logs if line["event"] == "dead_letters_dropped"])
    assert told[0] | {"log_level": ""} == {
        "event": "dead_letters_dropped",
        "log_level": "",
        "topic": own_topic,
        "partition": 3,
        "first_offset": 105,
        "last_offset": 107,
        "records": 3,
    }
    breakable_broker.start()
    flushed(dead)
    records = written(breakable_broker, own_topic, 5)
    assert [dict(record.headers)["freshet-offset"] for record in records] == [b"%d" % n for n in range(100, 105)]


@pytest.mark.integration
def test_the_buffer_is_bounded_in_bytes_too(own_letters: Letters, breakable_broker: Broker, own_topic: str) -> None:
    breakable_broker.stop()
    dead = own_letters()
    value = b"x" * 1_000_000
    for offset in range(100):
        dead.send(origin(own_topic, offset, value), Reason.NOT_JSON, "no")
    assert dead.pending + dead.dropped == 100
    assert 50 < dead.pending < 70


@pytest.mark.integration
def test_a_broker_that_does_not_answer_holds_nothing_up(
    own_letters: Letters, breakable_broker: Broker, own_topic: str
) -> None:
    dead = own_letters()
    dead.send(origin(own_topic, 0), Reason.NOT_JSON, "no")
    flushed(dead)
    breakable_broker.pause()
    for offset in range(1, 100):
        dead.send(origin(own_topic, offset), Reason.NOT_JSON, "no")
    assert not dead.flush(0.1)
    breakable_broker.resume()
    flushed(dead)
    assert dead.dropped == 0


@pytest.mark.integration
def test_what_cannot_be_written_at_the_end_is_dropped_and_told(
    own_letters: Letters, breakable_broker: Broker, own_topic: str
) -> None:
    breakable_broker.stop()
    dead = own_letters()
    dead.send(origin(own_topic, 5), Reason.NOT_JSON, "no")
    with structlog.testing.capture_logs() as logs:
        dead.close(0.1)
        dead.close(0.1)
    assert (dead.pending, dead.dropped) == (0, 1)
    assert [line["first_offset"] for line in logs if line["event"] == "dead_letters_dropped"] == [5]
    dead.send(origin(own_topic, 6), Reason.NOT_JSON, "no")
    assert (dead.pending, dead.dropped) == (0, 2)


def test_without_a_topic_rejected_records_are_only_counted() -> None:
    for dead in (KafkaDeadLetters(KafkaSettings(dead_letter_suffix="")), NoDeadLetters()):
        dead.send(origin("clicks", 1), Reason.NOT_JSON, "no")
        assert (dead.pending, dead.dropped) == (0, 0)
        assert dead.flush(1)
        dead.close(1)
