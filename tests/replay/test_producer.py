"""The producer against a real broker."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replay.kafka_client import KafkaUnavailableError, create_topic, ensure_topic, security_options
from replay.local_stack import Broker, free_port, start_broker
from replay.producer import MAX_PENDING, DeliveryError, EventProducer
from tests.replay.kafka_reading import read_all
from tests.waiting import eventually

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("codec", [None, "gzip", "snappy", "lz4", "zstd"])
def test_every_record_arrives_once_and_in_order_with_any_codec(broker: Broker, topic: str, codec: str | None) -> None:
    with EventProducer(broker.bootstrap_servers, topic, codec) as producer:
        for number in range(3000):
            producer.send(number, "u", b"%d" % number)
        producer.flush()
        assert (producer.delivered, producer.failed, producer.pending) == (3000, 0, 0)
        assert producer.next_number is None
    assert [int(record.value) for record in read_all(broker.bootstrap_servers, topic)] == list(range(3000))


def test_a_records_timestamp_is_the_time_of_sending(broker: Broker, topic: str) -> None:
    before = time.time() * 1000
    with EventProducer(broker.bootstrap_servers, topic) as producer:
        producer.send(0, "u", b"{}")
        producer.flush()
    after = time.time() * 1000
    (record,) = read_all(broker.bootstrap_servers, topic)
    assert int(before) <= record.timestamp <= after
    assert (record.key, record.value) == (b"u", b"{}")


def test_a_user_stays_in_the_partition_that_any_kafka_client_would_choose(broker: Broker, topic: str) -> None:
    name = f"{topic}-four"
    create_topic(broker.bootstrap_servers, name, 4)
    # murmur2 as the tests of Kafka's own Java client have it
    hashes = {"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536}
    users = [*hashes, *(f"user-{number}" for number in range(40))] * 3
    with EventProducer(broker.bootstrap_servers, name) as producer:
        for number, user in enumerate(users):
            producer.send(number, user, b"%d" % number)
        producer.flush()
    records = read_all(broker.bootstrap_servers, name)
    assert len(records) == len(users)
    for user in set(users):
        theirs = [record for record in records if record.key == user.encode()]
        assert [int(record.value) for record in theirs] == [n for n, other in enumerate(users) if other == user]
        assert len({record.partition for record in theirs}) == 1
        if user in hashes:
            assert theirs[0].partition == (hashes[user] & 0x7FFFFFFF) % 4
    assert {record.partition for record in records} == {0, 1, 2, 3}


def test_more_than_may_be_pending_is_waited_for_not_dropped(broker: Broker, topic: str) -> None:
    with EventProducer(broker.bootstrap_servers, topic) as producer:
        for number in range(MAX_PENDING + 1000):
            producer.send(number, str(number % 7), b"x")
            assert producer.pending <= MAX_PENDING
        producer.flush()
        assert producer.delivered == MAX_PENDING + 1000


def test_a_broker_that_comes_back_in_time_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with start_broker(tmp_path) as own:
        create_topic(own.bootstrap_servers, "t")
        with EventProducer(own.bootstrap_servers, "t") as producer:
            for number in range(1000):
                producer.send(number, "u", b"%d" % number)
                if number == 500:
                    own.restart()
            producer.flush()
            assert producer.delivered == 1000
        assert [int(record.value) for record in read_all(own.bootstrap_servers, "t")] == list(range(1000))


def test_a_broker_that_stays_away_is_an_error_that_counts_and_says_where_to_go_on(tmp_path: Path) -> None:
    with start_broker(tmp_path) as own:
        create_topic(own.bootstrap_servers, "t")
        limits = {"delivery_timeout_ms": 1500, "request_timeout_ms": 1000}
        with EventProducer(own.bootstrap_servers, "t", **limits) as producer:
            for number in range(100):
                producer.send(number, "u", b"x")
            producer.flush()
            own.kill()
            producer.send(100, "u", b"x")
            with pytest.raises(DeliveryError, match="did not take"):
                eventually(lambda: producer.send(101, "u", b"x"))
            assert producer.delivered == 100
            assert producer.failed >= 1
            assert producer.next_number == 100
            with pytest.raises(DeliveryError):
                producer.flush(1)


def test_a_record_that_is_too_long_is_an_error_not_a_loss(broker: Broker, topic: str) -> None:
    with EventProducer(broker.bootstrap_servers, topic) as producer:
        producer.send(0, "u", b"fits")
        with pytest.raises(DeliveryError, match="larger than"):
            producer.send(1, "u", b"x" * 2_000_000)
        assert producer.next_number in (0, 1)


def test_no_broker_is_one_line() -> None:
    with pytest.raises(KafkaUnavailableError, match="cannot be reached") as caught:
        EventProducer(f"127.0.0.1:{free_port()}", "t", bootstrap_timeout_ms=500)
    assert "\n" not in str(caught.value)


def test_a_topic_is_made_only_when_asked_for(broker: Broker, topic: str) -> None:
    name = f"{topic}-new"
    with pytest.raises(KafkaUnavailableError, match=r"no topic .*--create-topic"):
        ensure_topic(broker.bootstrap_servers, name, None)
    ensure_topic(broker.bootstrap_servers, name, 3)
    ensure_topic(broker.bootstrap_servers, name, 5)  # is there already, and stays as it is
    with EventProducer(broker.bootstrap_servers, name) as producer:
        for number in range(100):
            producer.send(number, str(number), json.dumps({}).encode())
        producer.flush()
    assert {record.partition for record in read_all(broker.bootstrap_servers, name)} == {0, 1, 2}


def test_security_is_read_from_the_workers_variables() -> None:
    given = {
        "SECURITY_PROTOCOL": "SASL_SSL",
        "SASL_MECHANISM": "SCRAM-SHA-256",
        "SASL_USERNAME": "me",
        "SASL_PASSWORD": "secret",
        "SSL_CAFILE": "/ca.pem",
        "SSL_CHECK_HOSTNAME": "false",
    }
    assert security_options({f"FRESHET_KAFKA__{name}": text for name, text in given.items()}) == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-256",
        "sasl_plain_username": "me",
        "sasl_plain_password": "secret",
        "ssl_cafile": "/ca.pem",
        "ssl_check_hostname": False,
    }
    assert security_options({}) == {"ssl_check_hostname": True}


def test_an_interrupt_while_connecting_is_heeded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        program = (
            "from replay.producer import EventProducer\n"
            f"EventProducer('127.0.0.1:{silent.getsockname()[1]}', 't', bootstrap_timeout_ms=3000)\n"
        )
        # the signal's usual effect, which a shell's background job would not have
        restore = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        with subprocess.Popen([sys.executable, "-c", restore + program], stderr=subprocess.PIPE, text=True) as process:
            silent.accept()
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)[1]
    assert said.splitlines()[-1].startswith("KeyboardInterrupt"), said
