"""Real servers for the tests, started only when a test asks for one."""

import itertools
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka import KafkaProducer
from redis import Redis

from replay.local_stack import (
    Broker,
    KafkaBroker,
    NoidaBroker,
    RedisServer,
    create_topic,
    start_broker,
    start_redis,
)
from tests.clicks import MakeWorker, Send
from tests.worker_process import SECRET_MARK, WorkerProcess

_names = itertools.count()


def broker_kind() -> str:
    """What `broker` will be: Apache Kafka where KAFKA_HOME is set, else the broker of the noida-db wheel."""
    return "kafka" if os.environ.get("KAFKA_HOME") else "noida"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without KAFKA_HOME the tests of what only Apache Kafka does are left out; with it a failure is a failure."""
    if broker_kind() == "kafka":
        return
    left_out = [item for item in items if item.get_closest_marker("apache_kafka")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        print(f"\n{len(left_out)} tests need Apache Kafka and are left out: KAFKA_HOME is not set")


@pytest.fixture(scope="session", params=[broker_kind()])
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for the whole session; a test that breaks brokers starts its own."""
    with start_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture(scope="session")
def _another_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("breakable-broker")
    broker: Broker = NoidaBroker(folder)
    if broker_kind() == "kafka":
        broker = KafkaBroker(folder, extra_properties={"auto.create.topics.enable": "true"})
    with broker:
        yield broker


@pytest.fixture
def breakable_broker(_another_broker: Broker) -> Iterator[Broker]:
    """A running broker that a test may stop, kill or pause; it makes topics by itself when it is asked to."""
    if not _another_broker.running:
        _another_broker.start()
    yield _another_broker
    if _another_broker.running:
        _another_broker.resume()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the whole session; a test that breaks Redis starts its own."""
    with start_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def redis_client(redis_server: RedisServer) -> Iterator[Redis]:
    """A client (bytes in and out) of an empty database."""
    with Redis.from_url(redis_server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def redis_url(redis_client: Redis, redis_server: RedisServer) -> str:
    """The URL of an empty database."""
    return redis_server.url


@pytest.fixture
def topic(broker: Broker) -> str:
    """A fresh topic with one partition."""
    name = f"clicks-{next(_names)}-{uuid.uuid4().hex[:8]}"
    create_topic(broker.bootstrap_servers, name)
    return name


@pytest.fixture
def make_worker(tmp_path: Path, broker: Broker, topic: str, redis_url: str) -> Iterator[MakeWorker]:
    """Makes workers on the test's topic; none outlives the test, and none has printed anything secret."""
    made: list[WorkerProcess] = []

    def make(
        name: str = "worker",
        topic: str = topic,
        redis_url: str = redis_url,
        bootstrap_servers: str = broker.bootstrap_servers,
        **settings: object,
    ) -> WorkerProcess:
        made.append(WorkerProcess(tmp_path / name, bootstrap_servers, topic, redis_url, **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.__exit__(None, None, None)
    for worker in made:
        assert SECRET_MARK not in (worker.log_path.read_text() if worker.log_path.exists() else "")


@pytest.fixture
def send(broker: Broker, topic: str) -> Iterator[Send]:
    """Sends record values to the test's topic, in order."""
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, acks="all")

    def send(values: list[bytes | None]) -> None:
        futures = [producer.send(topic, value, key=b"k") for value in values]
        producer.flush()
        for future in futures:
            future.get(30)

    yield send
    producer.close()
