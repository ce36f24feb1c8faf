"""The local servers: they answer, keep their data and port, and leave nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kafka import KafkaConsumer, KafkaProducer
from kafka.structs import TopicPartition
from redis import Redis

from replay.local_stack import (
    Broker,
    KafkaBroker,
    RedisServer,
    StackError,
    create_topic,
    free_port,
    start_broker,
)
from tests.waiting import eventually

pytestmark = pytest.mark.integration


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # a zombie whose parent has not looked yet is gone for every purpose here
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def values(broker: Broker, topic: str) -> list[bytes]:
    with KafkaConsumer(bootstrap_servers=broker.bootstrap_servers, consumer_timeout_ms=10_000) as consumer:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        consumer.seek_to_beginning(partition)
        end = consumer.end_offsets([partition])[partition]
        found = []
        while consumer.position(partition) < end:
            for records in consumer.poll(1000).values():
                found += [record.value for record in records]
        return found


def test_redis_answers_and_stop_leaves_no_process(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        assert server.process is not None
        pid = server.process.pid
        assert Redis.from_url(server.url).info("server")["redis_version"] >= "8"
        assert os.getpgid(pid) != os.getpgid(0)
    assert not exists(pid)


def test_redis_keeps_port_and_appended_data_over_a_kill(tmp_path: Path) -> None:
    with RedisServer(tmp_path, extra_args=["--appendonly", "yes", "--appendfsync", "always"]) as server:
        url = server.url
        Redis.from_url(url).set("key", "value")
        server.kill()
        assert not server.running
        server.start()
        assert server.url == url
        assert Redis.from_url(url).get("key") == b"value"


def test_a_paused_server_answers_again_after_resume_and_can_be_stopped_while_paused(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        server.pause()
        assert not server.answers()
        server.resume()
        assert server.answers()
        server.pause()
    assert not server.running


def test_a_server_that_ends_at_its_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"(?s)redis ended at its start.*no-such-option"):
        RedisServer(tmp_path, extra_args=["--no-such-option", "1"]).start()


def test_a_taken_port_is_an_error_for_the_second_server(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "one") as first, pytest.raises(StackError, match="is taken"):
        RedisServer(tmp_path / "two", port=first.port).start()


def test_servers_go_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from replay.local_stack import RedisServer\n"
        f"server = RedisServer({str(tmp_path)!r}).start()\n"
        "print(server.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert exists(pid)
        parent.send_signal(signal.SIGKILL)
    eventually(lambda: not exists(pid))


def test_the_broker_keeps_its_records_over_a_restart_and_apache_kafka_over_a_kill(tmp_path: Path) -> None:
    with start_broker(tmp_path) as broker:
        assert create_topic(broker.bootstrap_servers, "kept")
        assert not create_topic(broker.bootstrap_servers, "kept")
        with KafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:
            producer.send("kept", b"before").get(10)
        before = broker.bootstrap_servers
        broker.kill() if isinstance(broker, KafkaBroker) else broker.stop()
        broker.start()
        assert broker.bootstrap_servers == before
        with KafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:
            producer.send("kept", b"after").get(10)
        assert values(broker, "kept") == [b"before", b"after"]
        assert broker.process is not None
        pid = broker.process.pid
    assert not exists(pid)


def test_the_session_broker_serves_a_fresh_topic(broker: Broker, topic: str) -> None:
    with KafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:
        producer.send(topic, b"one").get(10)
    assert values(broker, topic) == [b"one"]


def test_free_ports_are_outside_the_range_of_outgoing_ports() -> None:
    assert all(20_000 <= free_port() < 32_000 for _ in range(20))
