"""The items topic, from Kafka to Redis: descriptions arrive, change, are withdrawn, and survive a kill."""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from redis import Redis

from replay.local_stack import Broker, create_topic
from tests.clicks import MakeWorker, Send, clicks
from tests.consistency import inconsistencies
from tests.waiting import eventually
from tests.worker_process import WorkerProcess
from worker.checkpoint import load

pytestmark = pytest.mark.integration

Describe = Callable[[list[tuple[str, bytes | None]]], None]
MakeItemsWorker = Callable[..., WorkerProcess]


def description(item: str, title: str = "", available: bool | None = None, **attributes: object) -> tuple[str, bytes]:
    said = {"item_id": item, "title": title or f"Title of {item}", "attributes": attributes}
    return item, json.dumps(said | ({} if available is None else {"available": available})).encode()


@pytest.fixture
def items_topic(broker: Broker, topic: str) -> str:
    name = topic.replace("clicks", "items")
    create_topic(broker.bootstrap_servers, name)
    create_topic(broker.bootstrap_servers, f"{name}.dead-letter")
    return name


@pytest.fixture
def describe(broker: Broker, items_topic: str) -> Describe:
    def send(records: list[tuple[str, bytes | None]]) -> None:
        with KafkaProducer(bootstrap_servers=broker.bootstrap_servers, acks="all") as producer:
            futures = [producer.send(items_topic, value, key=key.encode()) for key, value in records]
            producer.flush()
            for future in futures:
                future.get(30)

    return send


@pytest.fixture
def make(make_worker: MakeWorker, items_topic: str) -> MakeItemsWorker:
    return partial(make_worker, kafka__items_topic=items_topic)


def item(client: Redis, item_id: str) -> dict[str, str]:
    """What is published of an item, without its vector."""
    fields = client.hgetall(f"rec:item:{item_id}")
    return {name.decode(): value.decode() for name, value in fields.items() if name != b"vector"}  # type: ignore[union-attr]


def popular(client: Redis) -> set[str]:
    return {name.decode() for name in client.zrange("rec:popular", 0, -1)}  # type: ignore[union-attr]


def test_descriptions_arrive_change_and_are_withdrawn(
    make: MakeItemsWorker, send: Send, describe: Describe, redis_client: Redis
) -> None:
    values, _, clicked = clicks(500)
    most = clicked.most_common(1)[0][0]
    describe([description(most, "Erster Titel ü", genres=["War"], year=1995), description("unclicked", genres=["War"])])
    send(values)
    # An hour between two rounds of items: what changes below does not wait for one.
    worker = make(publish__item_interval_s=3600, kafka__start="latest").start().wait_ready()
    worker.wait_read(2)
    send(values)  # the first ones came before the worker was there
    worker.wait_read(502)
    eventually(lambda: item(redis_client, most).get("title") == "Erster Titel ü", what="the title")
    assert json.loads(item(redis_client, most)["attributes"]) == {"genres": ["War"], "year": 1995}
    assert item(redis_client, most)["available"] == "1"
    assert item(redis_client, "unclicked")["events"] == "0"
    describe([description("another")])  # the list goes with what is described
    eventually(lambda: most in popular(redis_client), what="the most popular item")

    describe([description(most, "Zweiter Titel", available=False)])
    eventually(lambda: item(redis_client, most)["available"] == "0", what="what cannot be had")
    assert (item(redis_client, most)["title"], item(redis_client, most)["attributes"]) == ("Zweiter Titel", "{}")
    eventually(lambda: most not in popular(redis_client), what="a list without it")

    describe([description(most, "Dritter Titel")])
    eventually(lambda: item(redis_client, most)["available"] == "1" and most in popular(redis_client), what="it again")
    describe([(most, None), ("unclicked", None)])
    eventually(lambda: item(redis_client, most)["title"] == "", what="an item without a title")
    eventually(lambda: not redis_client.exists("rec:item:unclicked"), what="the end of what nobody clicked")
    beat = worker.wait_read(507)
    assert (beat["events_described"], beat["events_withdrawn"], beat["events_learned"]) == ("5", "2", "500")
    assert worker.stop() == 0
    _, state = load(worker.checkpoints()[0].path)
    assert sum(Counter(state["ingest"]["counts"]).values()) == 507 == state["ingest"]["records"]


def test_a_new_items_vector_is_like_those_of_clicked_items_with_its_attributes(
    make: MakeItemsWorker, send: Send, describe: Describe, redis_client: Redis
) -> None:
    values, users, clicked = clicks(4000)
    group = {name: int(name[1:]) % 4 for name in [*clicked, *users]}  # users click items of their own group
    describe([description(name, name, cluster=[f"c{group[name]}"]) for name in clicked])
    worker = make().start().wait_ready()
    send(values)
    worker.wait_read(4000 + len(clicked))
    describe([description("new", "new", cluster=["c3"])])
    new = eventually(lambda: redis_client.hget("rec:item:new", "vector"), what="the new item's vector")
    assert worker.stop() == 0
    scores: dict[int, list[float]] = {number: [] for number in range(4)}
    for user in users:
        vector = redis_client.hget(f"rec:user:{user}", "vector")
        scores[group[user]].append(float(np.frombuffer(vector, "<f4") @ np.frombuffer(new, "<f4")))  # type: ignore[call-overload]
    means = {number: np.mean(of) for number, of in scores.items()}
    assert max(means, key=lambda number: means[number]) == 3


def test_broken_descriptions_are_counted_by_reason_and_go_to_their_own_topic(
    make: MakeItemsWorker, describe: Describe, broker: Broker, items_topic: str, redis_client: Redis
) -> None:
    broken = {
        b"{": "not_json", b"\xff": "not_utf8", b"[]": "not_object", b"{}": "bad_item_id",
        b'{"item_id": 1, "title": 7}': "bad_title", b'{"item_id": 1, "title": "' + b"x" * 600 + b'"}': "bad_title",
        b'{"item_id": 1, "attributes": [1]}': "bad_attributes",
        b'{"item_id": 1, "attributes": {"a": ' + b"[" * 20 + b"]" * 20 + b"}}": "bad_attributes",
        b'{"item_id": 1, "attributes": {"a": "' + b"x" * 5000 + b'"}}': "bad_attributes",
        b'{"item_id": 1, "available": 1}': "bad_available", b'{"item_id": 1, "timestamp": "soon"}': "bad_timestamp",
        b'{"item_id": 1, "timestamp": "2999-01-01"}': "future_timestamp",
    }  # fmt: skip
    describe([*(("k", value) for value in broken), description("1", "good"), ("", None)])
    worker = make().start().wait_ready()
    beat = worker.wait_read(len(broken) + 2)
    reasons = Counter(broken.values())
    assert {reason: int(beat[f"rejected_{reason}"]) for reason in reasons} == reasons
    assert (beat["events_described"], beat["events_tombstone"]) == ("1", "1")
    assert worker.metric("freshet_rejected_total", reason="bad_attributes") == 3
    eventually(lambda: item(redis_client, "1").get("title") == "good", what="the good one")
    partition = TopicPartition(f"{items_topic}.dead-letter", 0)
    with KafkaConsumer(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([partition])
        letters: list[tuple[bytes, str]] = []

        def all_there() -> bool:
            come = consumer.poll(timeout_ms=500).get(partition, [])
            letters.extend((record.value, dict(record.headers)["freshet-reason"].decode()) for record in come)
            return len(letters) == len(broken)

        eventually(all_there, what="the dead letters")
    assert dict(letters) == broken


def test_a_kill_in_mid_stream_loses_and_doubles_no_description_and_no_click(
    make: MakeItemsWorker, send: Send, describe: Describe, redis_client: Redis
) -> None:
    values, _, clicked = clicks(3000)
    names = [f"d{n}" for n in range(500)] + list(clicked)
    worker = make(checkpoint__every_events=500).start()
    for part in range(3):
        describe([description(name, f"{name} v{part}", available=name != "d7", n=part) for name in names])
        send(values[1000 * part : 1000 * (part + 1)])
        worker.wait_read(1 if part == 0 else 1000)  # anywhere in the middle
        worker.kill()
        worker.start()
    total = 3000 + 3 * len(names)
    beat = worker.wait_ready().wait_read(total)
    assert int(beat["events_read"]) == total
    assert (int(beat["events_described"]), int(beat["events_learned"])) == (3 * len(names), 3000)
    assert int(beat["descriptions"]) == len(names)
    have = [name for name in names if name != "d7"]  # nobody has clicked that one, and it cannot be had
    eventually(lambda: all(item(redis_client, n).get("title") == f"{n} v2" for n in have), what="all titles")
    assert not redis_client.exists("rec:item:d7")
    assert worker.stop() == 0
    saved, state = load(worker.checkpoints()[0].path)
    assert inconsistencies(saved, state) == []
    catalogue = state["ingest"]["catalogue"]
    assert dict(zip(catalogue["ids"], catalogue["titles"], strict=True)) == {name: f"{name} v2" for name in names}
    assert catalogue["unavailable"] == ["d7"]


def test_a_topic_that_is_named_later_is_read_from_its_beginning(
    make: MakeItemsWorker, make_worker: MakeWorker, send: Send, describe: Describe, redis_client: Redis
) -> None:
    values, *_ = clicks(200)
    send(values)
    describe([description("i1", "Named before")])
    first = make_worker().start().wait_ready()
    first.wait_read(200)
    assert first.stop() == 0
    second = make(kafka__start="latest").start().wait_ready()
    second.wait_read(201)
    eventually(lambda: item(redis_client, "i1").get("title") == "Named before", what="the title")
    assert "items" in second.command("check")
