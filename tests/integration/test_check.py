"""`python -m worker check` against real servers."""

import io
import os
import socket
from pathlib import Path

import pytest
from kafka import KafkaProducer
from pydantic import SecretStr
from redis import Redis

from replay.local_stack import Broker, RedisServer, create_topic, free_port
from tests.waiting import eventually
from worker.check import run_checks
from worker.checkpoint import CheckpointFolder
from worker.publisher import Heartbeat, Meta, Publisher
from worker.settings import (
    CheckpointSettings,
    HttpSettings,
    KafkaSettings,
    ModelConfig,
    RedisSettings,
    RuntimeSettings,
    Settings,
)

pytestmark = pytest.mark.integration


def checked(settings: Settings) -> tuple[int, list[str]]:
    out = io.StringIO()
    return run_checks(settings, out), out.getvalue().splitlines()


@pytest.fixture
def settings(broker: Broker, topic: str, redis_url: str, tmp_path: Path) -> Settings:
    return Settings(
        kafka=KafkaSettings(bootstrap_servers=broker.bootstrap_servers, topics=(topic,)),
        redis=RedisSettings(url=SecretStr(redis_url)),
        checkpoint=CheckpointSettings(dir=tmp_path / "not there yet" / "checkpoints"),
        http=HttpSettings(port=free_port()),
        runtime=RuntimeSettings(device="cpu"),
    )


def changed(settings: Settings, **sections: object) -> Settings:
    return settings.model_copy(update=sections)


def test_everything_is_there(settings: Settings, broker: Broker, topic: str, redis_client: Redis) -> None:
    create_topic(broker.bootstrap_servers, f"{topic}.dead-letter")
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
    for _ in range(3):
        producer.send(topic, b"{}")
    producer.close()
    code, lines = checked(settings)
    assert code == 0
    assert [line.split()[0] for line in lines] == ["ok"] * len(lines)
    text = "\n".join(lines)
    assert f"{topic}: 3 offsets in 1 partitions (0: 0 to 3)" in text
    assert "nobody has published under rec yet" in text
    assert "none yet: a worker starts with an empty model" in text
    assert "no worker has the folder" in text
    assert f"127.0.0.1:{settings.http.port} is free" in text
    assert not settings.checkpoint.dir.exists()
    assert redis_client.dbsize() == 0


def test_a_topic_that_is_not_there_fails_and_is_not_made(settings: Settings) -> None:
    kafka = settings.kafka.model_copy(update={"topics": ("no-such-topic",)})
    for _ in range(2):
        code, lines = checked(changed(settings, kafka=kafka))
        assert code == 1
        assert any(line.startswith("FAIL  topic") and "no-such-topic is not there" in line for line in lines)


def test_servers_that_are_away_fail_with_the_address_and_no_secret(settings: Settings, tmp_path: Path) -> None:
    nowhere = free_port()
    file = tmp_path / "file"
    file.touch()
    code, lines = checked(
        changed(
            settings,
            kafka=settings.kafka.model_copy(update={"bootstrap_servers": f"127.0.0.1:{nowhere}"}),
            redis=RedisSettings(url=SecretStr(f"redis://:s3cret@127.0.0.1:{nowhere}/0")),
            checkpoint=CheckpointSettings(dir=file / "checkpoints"),
        )
    )
    assert code == 1
    failed = [line.split()[1] for line in lines if line.startswith("FAIL")]
    assert failed == ["kafka", "redis", "checkpoints"]
    assert str(nowhere) in lines[0]
    assert "s3cret" not in "\n".join(lines)


def test_who_publishes_is_told(settings: Settings, redis_url: str) -> None:
    publisher = Publisher(settings.redis, settings.publish, Meta(5, "two_tower", exact=True, model="m", started_ms=1))
    publisher.start()
    eventually(lambda: publisher.ready_for(Heartbeat))
    publisher.submit(Heartbeat({}))
    eventually(publisher.acknowledged)
    code, lines = checked(settings)
    publisher.close(1)
    (claim,) = [line for line in lines if line.split()[1] == "claim"]
    assert claim.startswith(f"warn  claim        epoch {publisher.epoch}, ")
    assert "dim 5, two_tower publishes now" in claim
    code, lines = checked(changed(settings, model=ModelConfig(family="mf")))
    assert code == 1
    assert any(line.startswith("FAIL  claim") and "mf needs another FRESHET_REDIS__PREFIX" in line for line in lines)


def test_a_port_that_is_taken_fails_unless_the_worker_that_runs_here_has_it(settings: Settings) -> None:
    folder = CheckpointFolder(settings.checkpoint.dir, 3)
    with socket.create_server(("127.0.0.1", settings.http.port)):
        code, lines = checked(settings)
        assert code == 1
        (line,) = [line for line in lines if line.startswith("FAIL")]
        assert (
            f"http         FRESHET_HTTP__HOST, FRESHET_HTTP__PORT: cannot listen on 127.0.0.1:{settings.http.port}"
            in line
        )
        folder.lock()
        code, lines = checked(settings)
        assert code == 0
        warned = [line.split()[1] for line in lines if line.startswith("warn")]
        assert {"lock", "http"} <= set(warned)
        assert any(f"process {os.getpid()} on {socket.gethostname()} has the folder" in line for line in lines)
        folder.unlock()
        assert checked(settings)[0] == 1
    assert checked(settings)[0] == 0


def test_a_replica_fails_and_evictions_are_warned_of(settings: Settings, tmp_path: Path) -> None:
    with RedisServer(tmp_path, extra_args=["--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]) as server:
        redis = RedisSettings(url=SecretStr(server.url))
        code, lines = checked(changed(settings, redis=redis))
        assert code == 0
        assert any(line.startswith("warn  redis") and "allkeys-lru" in line for line in lines)
        with Redis.from_url(server.url) as client:
            client.replicaof("127.0.0.1", free_port())
        code, lines = checked(changed(settings, redis=redis))
        assert code == 1
        assert any(line.startswith("FAIL  redis") and "replica" in line for line in lines)
