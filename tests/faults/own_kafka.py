"""A Kafka of the test's own, with a line to it that can be broken, and what the tests ask of a broker."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import RetriableError
from kafka.structs import OffsetAndMetadata

from replay.local_stack import KafkaBroker, free_port
from tests.faults.crash_matrix import counted
from tests.proxy import TcpProxy
from tests.worker_process import WorkerProcess
from worker.checkpoint import load
from worker.source import Partition

GROUP = "freshet"  # the worker's, unless the settings say otherwise


class LinedBroker(KafkaBroker):
    """Has a second listener that names the line as its address: who connects there stays on the line."""

    def __init__(self, data_dir: Path, port: int | None = None, **extra_properties: str) -> None:
        super().__init__(data_dir, port, extra_properties)
        self.behind_the_line, self.line_port = free_port(), free_port()

    @property
    def line_servers(self) -> str:
        """What a client on the line is given; somebody must listen there."""
        return f"127.0.0.1:{self.line_port}"

    def properties(self) -> dict[str, str]:
        properties = super().properties()
        properties["listeners"] += f",LINE://127.0.0.1:{self.behind_the_line}"
        properties["listener.security.protocol.map"] += ",LINE:PLAINTEXT"
        direct = f"PLAINTEXT://127.0.0.1:{self.port}"
        return properties | {"advertised.listeners": f"{direct},LINE://{self.line_servers}"}


class SecondBroker(KafkaBroker):
    """Joins another broker's cluster: node 2, without a vote."""

    def __init__(self, data_dir: Path, first: KafkaBroker) -> None:
        super().__init__(data_dir)
        self._first = first

    def properties(self) -> dict[str, str]:
        quorum = "controller.quorum.bootstrap.servers"
        return super().properties() | {
            "process.roles": "broker",
            "node.id": "2",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            quorum: self._first.properties()[quorum],
        }

    def format_arguments(self) -> list[str]:
        meta = (self._first.data_dir / "data" / "meta.properties").read_text()
        return ["-t", next(line for line in meta.splitlines() if line.startswith("cluster.id=")).partition("=")[2]]


@contextmanager
def line_to(broker: LinedBroker) -> Iterator[TcpProxy]:
    """The line; the broker is left running, whatever the test did to it."""
    if not broker.running:
        broker.start()
    with TcpProxy("127.0.0.1", broker.behind_the_line, broker.line_port) as line:
        yield line
    if broker.running:
        broker.resume()


def admin(servers: str) -> KafkaAdminClient:
    return KafkaAdminClient(bootstrap_servers=servers)


def committed(servers: str, topic: str, partition: int = 0, group: str = GROUP) -> int | None:
    """What the worker's group has committed."""
    with admin(servers) as client:
        try:
            found = client.list_group_offsets(group)[group]
        except RetriableError:  # a new group, or a broker that has just started
            return None
    there = found.get(TopicPartition(topic, partition))
    return there and there.offset


def commit(servers: str, topic: str, offset: int) -> None:
    """Commit for the worker's group, as somebody else would."""
    at = TopicPartition(topic, 0)
    consumer = KafkaConsumer(bootstrap_servers=servers, group_id=GROUP, enable_auto_commit=False)
    consumer.assign([at])
    consumer.commit({at: OffsetAndMetadata(offset, "", -1)})
    consumer.close()


def delete_before(servers: str, topic: str, offset: int) -> None:
    """As retention does it."""
    with admin(servers) as client:
        client.delete_records({TopicPartition(topic, 0): offset})


def send_to(servers: str, topic: str, values: list[bytes | None], partition: int = 0, **options: object) -> None:
    """Send record values to one partition, and wait until all are acknowledged."""
    time_ms = options.pop("timestamp_ms", None)
    with KafkaProducer(bootstrap_servers=servers, acks="all", **options) as producer:
        sent = [producer.send(topic, value, partition=partition, timestamp_ms=time_ms) for value in values]
        for future in sent:
            future.get(60)


def assert_learned(worker: WorkerProcess, users: Counter[str], items: Counter[str]) -> None:
    """The newest checkpoint of a worker that has stopped counts every event once."""
    learner = load(worker.checkpoints()[0].path)[1]["learner"]
    assert counted(learner, "users") == users
    assert counted(learner, "items") + waiting_items(learner) == items


def waiting_items(learner: dict[str, Any]) -> Counter[str]:
    """Items of events that are observed, whose mini-batch is not full yet."""
    table = learner["items"]
    lengths = table["lengths"].clamp_min(0).tolist()
    text, ends = table["text"].numpy().tobytes(), list(itertools.accumulate(lengths))
    rows = learner["pending"]["items"].tolist()
    return Counter(text[ends[row] - lengths[row] : ends[row]].decode() for row in rows)


def saved_position(worker: WorkerProcess, topic: str, partition: int = 0) -> int:
    """Of the newest checkpoint; -1 where it names none."""
    saved = worker.checkpoints()
    header = saved[0].header if saved else None
    return header.positions_by_partition().get(Partition(topic, partition), -1) if header else -1


def complaints(worker: WorkerProcess) -> list[dict[str, object]]:
    """Warnings and errors that this process has logged; fails for a line that is no line of the log."""
    whole = worker.log[: worker.log.rfind("\n") + 1]  # the last line may still be on its way
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line for line in lines if line["level"] in ("warning", "error", "critical")]
