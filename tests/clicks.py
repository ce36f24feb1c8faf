"""Clicks to send, and what became of them in Redis."""

from collections import Counter
from collections.abc import Callable

from kafka import KafkaProducer
from redis import Redis

from tests.streams import clustered
from tests.worker_process import WorkerProcess
from worker.events import encode

MakeWorker = Callable[..., WorkerProcess]
Send = Callable[[list[bytes | None]], None]


def send_all(bootstrap_servers: str, topic: str, values: list[bytes | None]) -> None:
    """Send record values in order, and wait until all are acknowledged."""
    producer = KafkaProducer(bootstrap_servers=bootstrap_servers, acks="all")
    try:
        futures = [producer.send(topic, value, key=b"k") for value in values]
        producer.flush()
        for future in futures:
            future.get(30)
    finally:
        producer.close()


def clicks(
    count: int, seed: int = 0, users: int = 300, prefix: str = ""
) -> tuple[list[bytes | None], Counter[str], Counter[str]]:
    """Encoded events and their counts by user and by item; `prefix` stands before the users' names."""
    events = clustered(count, seed=seed, users=users)
    names = [prefix + user for user in events.users]
    values: list[bytes | None] = [
        encode(user, item, event_id=f"{prefix}{seed}-{n}")
        for n, (user, item) in enumerate(zip(names, events.items, strict=True))
    ]
    return values, Counter(names), Counter(events.items)


def published(client: Redis, kind: str, prefix: str = "rec") -> dict[str, int]:
    """The number of events that each published user or item has."""
    head = f"{prefix}:{kind}:".encode()
    keys = list(client.scan_iter(match=f"{prefix}:{kind}:*", count=1000))
    with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.hget(key, "events")
        events = pipeline.execute()
    return {key.removeprefix(head).decode(): int(n or -1) for key, n in zip(keys, events, strict=True)}
