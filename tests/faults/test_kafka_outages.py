"""Kafka goes away under a running worker: silent, killed, cut off, slow, late, replaced. Nothing is lost or doubled."""

import json
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from replay.local_stack import create_topic
from tests.clicks import MakeWorker, clicks, send_all
from tests.faults.own_kafka import (
    LinedBroker,
    SecondBroker,
    admin,
    assert_learned,
    committed,
    complaints,
    line_to,
    saved_position,
    send_to,
)
from tests.kafka_log import spoil
from tests.proxy import TcpProxy
from tests.waiting import eventually
from tests.worker_process import WorkerProcess
from worker.events import encode

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.apache_kafka]

OUT_OF_REACH = "Kafka is out of reach"
_topics = count()


@pytest.fixture(scope="module")
def _broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinedBroker]:
    with LinedBroker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture
def line(_broker: LinedBroker) -> Iterator[TcpProxy]:
    """What the worker reaches `own_broker` through."""
    with line_to(_broker) as line:
        yield line


@pytest.fixture
def own_broker(_broker: LinedBroker, line: TcpProxy) -> LinedBroker:
    """A broker that the test may break; the test itself reaches it directly."""
    return _broker


@pytest.fixture
def servers(own_broker: LinedBroker) -> str:
    """Of `own_broker`, beside the line."""
    return own_broker.bootstrap_servers


@pytest.fixture
def own_topic(servers: str) -> str:
    """On `own_broker`, with one partition."""
    name = f"clicks-{next(_topics)}"
    create_topic(servers, name)
    return name


@pytest.fixture
def make(
    tmp_path_factory: pytest.TempPathFactory, own_broker: LinedBroker, own_topic: str, redis_url: str
) -> Iterator[MakeWorker]:
    """Makes workers that read `own_topic` through the line."""
    made: list[WorkerProcess] = []

    def make(topic: str = own_topic, servers: str = own_broker.line_servers, **settings: object) -> WorkerProcess:
        home = tmp_path_factory.mktemp("worker")
        made.append(WorkerProcess(home, servers, topic, redis_url, **{"kafka__metadata_max_age_ms": 500} | settings))
        return made[-1]

    yield make
    for worker in made:
        worker.__exit__(None, None, None)


def wait_out_of_reach(worker: WorkerProcess) -> None:
    """Until /readyz says so; /healthz stays green."""
    eventually(lambda: OUT_OF_REACH in worker.reasons().get("kafka", ""), 60, worker.describe)
    assert worker.get("/readyz")[0] == 503
    assert worker.get("/healthz")[0] == 200


def wait_turning(worker: WorkerProcess, beats: int = 5) -> None:
    """Until the loop has told so many new heartbeats: it is not held up."""
    for _ in range(beats):
        before = worker.heartbeat()["heartbeat_ms"]
        eventually(lambda before=before: worker.heartbeat()["heartbeat_ms"] > before, 60, worker.describe)


def assert_quiet(worker: WorkerProcess, limit: int = 20) -> None:
    """An outage is told, but in no more lines than somebody would read."""
    told = complaints(worker)
    assert 0 < len(told) <= limit, told


class Load(threading.Thread):
    """Sends one click after the other, whatever the weather, until it is told to stop."""

    def __init__(self, servers: str, topic: str, users: int = 50) -> None:
        super().__init__(daemon=True)
        self._producer = KafkaProducer(bootstrap_servers=servers, acks="all", delivery_timeout_ms=120_000)
        self._topic, self._users, self._ended = topic, users, threading.Event()
        self.sent = 0

    def run(self) -> None:
        while not self._ended.wait(0.002):
            value = encode(f"u{self.sent % self._users}", f"i{self.sent % 37}", event_id=str(self.sent))
            self._producer.send(self._topic, value, partition=0)
            self.sent += 1

    def stop(self) -> None:
        self._ended.set()
        self.join()
        self._producer.close()


def in_the_topic(servers: str, topic: str) -> tuple[int, Counter[str], Counter[str]]:
    """Records in partition 0, and its distinct events by user and by item."""
    at = TopicPartition(topic, 0)
    consumer = KafkaConsumer(bootstrap_servers=servers, auto_offset_reset="earliest")
    consumer.assign([at])
    end, values = consumer.end_offsets([at])[at], []
    while consumer.position(at) < end:
        values += [record.value for batch in consumer.poll(500).values() for record in batch]
    consumer.close()
    events = {event["event_id"]: event for event in map(json.loads, values)}.values()
    return len(values), Counter(e["user_id"] for e in events), Counter(e["item_id"] for e in events)


# Away.


def test_a_broker_that_accepts_and_never_answers_holds_nothing_up(
    make: MakeWorker, servers: str, own_topic: str, line: TcpProxy
) -> None:
    """K3: the loop goes on, what was learned is saved, and its positions are committed when the broker answers."""
    values, users, items = clicks(1200)
    worker = make(checkpoint__every_s=3).start().wait_ready()
    sent = fall_silent_before_a_save(worker, line, lambda part: send_all(servers, own_topic, part), values[:1000])
    wait_out_of_reach(worker)
    eventually(lambda: saved_position(worker, own_topic) == sent, 60, worker.describe)
    assert (committed(servers, own_topic) or 0) < sent
    wait_turning(worker)
    assert worker.get("/healthz")[0] == 200
    assert_quiet(worker)
    line.resume()
    worker.wait_ready()
    eventually(lambda: committed(servers, own_topic) == sent, 60, worker.describe)
    send_all(servers, own_topic, values[sent:])
    worker.wait_read(1200)
    assert worker.stop() == 0
    assert_learned(worker, users, items)
    assert committed(servers, own_topic) == 1200


def fall_silent_before_a_save(
    worker: WorkerProcess, line: TcpProxy, send: Callable[[list[bytes | None]], None], values: list[bytes | None]
) -> int:
    """Let the worker learn, and black-hole the line while some of that is not saved yet; how much was sent."""
    for sent in range(100, len(values) + 1, 100):
        send(values[sent - 100 : sent])
        worker.wait_read(sent)
        line.blackhole()
        if saved_position(worker, worker.settings["FRESHET_KAFKA__TOPICS"]) < sent:
            return sent
        line.resume()
    raise AssertionError("every part was saved before the line fell silent")


@pytest.mark.parametrize("down_s", [0, pytest.param(60, marks=pytest.mark.slow)])
def test_a_broker_that_is_killed_under_load_is_found_again(
    make: MakeWorker, own_broker: LinedBroker, servers: str, own_topic: str, down_s: float
) -> None:
    """K9: kill -9 while records come; away until that is noticed, or for a minute. Resumes unaided."""
    worker = make().start().wait_ready()
    load = Load(servers, own_topic)
    load.start()
    worker.wait_read(200)
    own_broker.kill()
    wait_out_of_reach(worker)
    time.sleep(down_s)  # the outage itself
    assert worker.get("/healthz")[0] == 200
    assert_quiet(worker)
    own_broker.start()
    worker.wait_ready()
    before = load.sent
    eventually(lambda: load.sent > before + 200, 60)
    load.stop()
    records, users, items = in_the_topic(servers, own_topic)
    worker.wait_read(records)
    assert worker.stop() == 0
    assert_learned(worker, users, items)
    assert saved_position(worker, own_topic) == records


@pytest.mark.slow
def test_connections_that_are_cut_in_mid_answer_lose_nothing(
    make: MakeWorker, servers: str, own_topic: str, line: TcpProxy
) -> None:
    """K9: cut again and again, somewhere in what the broker sends; what is committed only grows (K5)."""
    values, users, items = clicks(2000)
    seen: list[int] = []
    worker = make(checkpoint__every_events=50, kafka__max_poll_records=50).start().wait_ready()
    for part in range(10):
        line.cut_after("from_server", 997 * part + 13)
        send_all(servers, own_topic, values[200 * part : 200 * part + 200])
        eventually(lambda: not line.cut_pending, 60, worker.describe)
        worker.wait_read(200 * part + 200)
        seen.append(committed(servers, own_topic) or 0)
    worker.wait_ready()
    assert worker.stop() == 0
    assert_learned(worker, users, items)
    assert seen == sorted(seen)
    assert committed(servers, own_topic) == 2000


@pytest.mark.slow
def test_a_step_that_is_longer_than_every_limit_loses_and_doubles_nothing(
    make: MakeWorker, servers: str, own_topic: str
) -> None:
    """K4: the worker is frozen (SIGSTOP) in mid-stream for three times its longest limit; no error storm."""
    limit_ms, parts = 1000, 3
    values, users, items = clicks(2000 * parts)
    settings = {"kafka__request_timeout_ms": limit_ms, "kafka__max_poll_records": 5, "checkpoint__every_events": 200}
    worker = make(**settings, kafka__metadata_max_age_ms=300).start().wait_ready()
    left = []
    for sent in range(2000, 2000 * parts + 1, 2000):
        send_all(servers, own_topic, values[sent - 2000 : sent])
        worker.wait_read(sent - 1900)
        worker.signal(signal.SIGSTOP)
        left.append(sent - int(worker.heartbeat()["events_read"]))
        time.sleep(3 * limit_ms / 1000)  # the long step itself
        worker.signal(signal.SIGCONT)
    assert max(left) > 500, f"never in mid-stream: {left}"
    worker.wait_read(2000 * parts)
    worker.wait_ready()
    told = complaints(worker)
    assert len(told) <= 5, told
    assert worker.stop() == 0
    assert_learned(worker, users, items)
    assert committed(servers, own_topic) == saved_position(worker, own_topic) == 2000 * parts


@pytest.mark.slow
def test_a_line_on_which_every_piece_takes_long_is_slow_and_no_outage(
    make: MakeWorker, servers: str, own_topic: str, line: TcpProxy
) -> None:
    """Half a second each way: some seconds until it is connected, and then all is well."""
    values, users, items = clicks(300)
    line.delay(0.5)
    send_all(servers, own_topic, values)
    worker = make().start()
    worker.wait_read(300)
    worker.wait_ready()
    line.resume()
    assert worker.stop() == 0
    assert_learned(worker, users, items)


# Late and replaced.


@pytest.mark.slow
def test_a_worker_is_there_before_its_broker_and_its_broker_before_the_topic(
    make: MakeWorker, own_broker: LinedBroker, servers: str
) -> None:
    """K12: not ready, alive, and says what it waits for; begins by itself, from the topic's beginning."""
    values, users, items = clicks(300)
    own_broker.stop()
    worker = make(topic="comes-later", kafka__start="latest").start()
    wait_out_of_reach(worker)
    eventually(lambda: worker.logged("kafka_out_of_reach"), 60, worker.describe)
    wait_turning(worker)
    own_broker.start()
    eventually(lambda: worker.logged("topic_not_there"), 60, worker.describe)
    assert worker.logged("topic_not_there")[0]["topic"] == "comes-later"
    assert "the topic is not there yet" in worker.reasons()["kafka"]
    assert worker.get("/healthz")[0] == 200
    assert_quiet(worker)
    create_topic(servers, "comes-later")
    send_all(servers, "comes-later", values)
    worker.wait_read(300)
    worker.wait_ready()
    assert worker.stop() == 0
    assert_learned(worker, users, items)


@pytest.mark.parametrize(
    "count_after", [pytest.param(50, id="fewer records"), pytest.param(900, id="more records", marks=pytest.mark.slow)]
)
def test_a_broker_that_is_replaced_by_an_empty_one_is_read_from_its_beginning(
    make: MakeWorker, own_broker: LinedBroker, servers: str, own_topic: str, count_after: int
) -> None:
    """The same address, another cluster: all of its records are new, also those at offsets that were read before."""
    first, second = clicks(400), clicks(count_after, seed=1, prefix="second-")
    send_all(servers, own_topic, first[0])
    worker = make().start()
    worker.wait_read(400)
    own_broker.kill()
    wait_out_of_reach(worker)
    shutil.rmtree(own_broker.data_dir / "data")
    own_broker.start()
    create_topic(servers, own_topic)
    send_all(servers, own_topic, second[0])
    worker.wait_read(400 + count_after)
    worker.wait_ready()
    assert [(line["expected"], line["found"]) for line in worker.logged("gap")] == [(400, 0)]
    assert worker.stop() == 0
    assert_learned(worker, first[1] + second[1], first[2] + second[2])


# One partition.


@pytest.mark.slow
def test_a_partition_that_cannot_be_read_is_named_while_the_others_go_on(
    make: MakeWorker, own_broker: LinedBroker, servers: str, own_topic: str
) -> None:
    """K11, K14: one record of one partition has a codec that nobody knows."""
    values, *_ = clicks(200)
    with admin(servers) as client:
        client.create_partitions({own_topic: 2})
    for value in values[:10]:
        send_to(servers, own_topic, [value])  # a batch each
    send_to(servers, own_topic, values[10:100], partition=1)
    own_broker.stop()
    spoil(own_broker.data_dir / "data" / f"{own_topic}-0" / f"{0:020d}.log", 6, codec=7)
    own_broker.start()
    worker = make().start()
    eventually(lambda: f"{own_topic}/0: " in worker.reasons().get("partitions", ""), 60, worker.describe)
    assert "Unrecognized compression type" in worker.reasons()["partitions"]
    assert worker.get("/healthz")[0] == 200
    send_to(servers, own_topic, values[100:], partition=1)
    worker.wait_read(6 + 190)
    eventually(lambda: worker.metric("freshet_lag", topic=own_topic, partition="0") == 4, 60, worker.describe)
    eventually(lambda: worker.metric("freshet_lag", topic=own_topic, partition="1") == 0, 60, worker.describe)
    assert_quiet(worker)
    assert worker.stop() == 0
    assert (saved_position(worker, own_topic, 0), saved_position(worker, own_topic, 1)) == (6, 190)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "frozen"])
def test_a_partition_whose_broker_is_silent_is_named_while_the_others_go_on(
    make: MakeWorker, own_broker: LinedBroker, servers: str, tmp_path: Path, way: str
) -> None:
    """K11: two brokers with a partition each; one of them goes away, and comes back."""
    values, users, items = clicks(400)
    with SecondBroker(tmp_path / "second", own_broker) as second:
        name = f"split-{way}"
        with admin(servers) as client:
            client.create_topics({name: {"assignments": {0: [1], 1: [2]}}})
            client.wait_for_topics([name], timeout_ms=60_000)
        send_to(servers, name, values[:100], partition=1)
        worker = make(topic=name, servers=servers).start().wait_ready()
        worker.wait_read(100)
        second.kill() if way == "killed" else second.pause()
        for sent in range(100, 300, 10):
            send_to(servers, name, values[sent : sent + 10])
            worker.wait_read(sent + 10)
        eventually(lambda: f"{name}/1: " in worker.reasons().get("partitions", ""), 60, worker.describe)
        assert f"{name}/0" not in worker.reasons()["partitions"]
        assert "kafka" not in worker.reasons()
        assert worker.get("/healthz")[0] == 200
        assert_quiet(worker)
        second.start() if way == "killed" else second.resume()
        with admin(servers) as client:
            client.wait_for_topics([name], timeout_ms=60_000)
        send_to(servers, name, values[300:], partition=1)
        worker.wait_read(400)
        worker.wait_ready()
        assert worker.stop() == 0
        assert_learned(worker, users, items)
