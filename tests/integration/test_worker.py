"""The worker as a process, against a real broker and a real Redis."""

import json
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from kafka import KafkaConsumer, TopicPartition
from redis import Redis

from model.config import ModelConfig
from replay.local_stack import Broker, create_topic
from tests.clicks import MakeWorker, Send, clicks, published
from tests.streams import differences
from tests.waiting import eventually
from worker.checkpoint import load
from worker.events import encode
from worker.offline import offline_worker
from worker.settings import RuntimeSettings, Settings

pytestmark = pytest.mark.integration


def test_events_are_learned_published_and_saved(make_worker: MakeWorker, send: Send, redis_client: Redis) -> None:
    values, users, items = clicks(2000)
    send(values)
    worker = make_worker().start().wait_ready()
    beat = worker.wait_read(2000)
    assert beat["state"] == "running"
    assert int(beat["events_learned"]) == 2000
    eventually(lambda: published(redis_client, "user") == dict(users))
    eventually(lambda: published(redis_client, "item") == dict(items))
    meta = {k.decode(): v.decode() for k, v in redis_client.hgetall("rec:meta").items()}
    assert (meta["layout"], meta["dim"], meta["dtype"], meta["metric"]) == ("1", "83", "float32le", "dot")
    one = redis_client.hgetall("rec:user:u1")
    assert len(one[b"vector"]) == 4 * 83
    assert np.isfinite(np.frombuffer(one[b"vector"], "<f4")).all()
    assert set(json.loads(one[b"recent"])) <= set(items)
    assert redis_client.zcard("rec:popular") == len(items)
    assert worker.stop() == 0
    newest = worker.checkpoints()[0].header
    assert newest is not None
    assert newest.counts["learned"] == 2000
    assert [offset for _, _, offset in newest.positions] == [2000]


def test_a_click_changes_its_users_vector(make_worker: MakeWorker, send: Send, redis_client: Redis) -> None:
    values, *_ = clicks(500)
    send(values)
    worker = make_worker(publish__background_per_s=0).start().wait_ready()
    worker.wait_read(500)
    before = redis_client.hgetall("rec:user:u1")
    send([encode("u1", "i7")])
    after = eventually(lambda: redis_client.hgetall("rec:user:u1") if int(
        redis_client.hget("rec:user:u1", "events") or 0) > int(before[b"events"]) else None)  # fmt: skip
    assert after[b"vector"] != before[b"vector"]
    assert json.loads(after[b"recent"])[0] == "i7"
    assert int(after[b"version"]) > int(before[b"version"])
    send([encode("a newcomer", "i7")])
    new = eventually(lambda: redis_client.hgetall("rec:user:a newcomer"))
    assert np.abs(np.frombuffer(new[b"vector"], "<f4")[:-1]).sum() > 0  # one click makes a useful vector


BROKEN: list[bytes | None] = [
    b"\xff{", b"", b"{", b"[]", b"null", b"7", b'"text"', b'{"user_id": 1}', b'{"item_id": 1}',
    b'{"user_id": true, "item_id": 1}', b'{"user_id": 1.5, "item_id": 1}', b'{"user_id": "", "item_id": 1}',
    b'{"user_id": 1, "item_id": "' + b"x" * 300 + b'"}', b'{"user_id": 1, "item_id": 2, "value": NaN}',
    b'{"user_id": 1, "item_id": 2, "value": 1e999}', b'{"user_id": 1, "item_id": 2, "event_type": "dance"}',
    b'{"user_id": 1, "item_id": 2, "timestamp": "yesterday"}', b'{"user_id": 1, "item_id": 2, "timestamp": 9e12}',
    b'{"user_id": 1, "item_id": 2},{"user_id": 3, "item_id": 4}', b"[" * 5000, None,
]  # fmt: skip


def test_a_thousand_broken_records_among_good_ones_are_all_accounted_for(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str
) -> None:
    good, *_ = clicks(3000)
    broken = [BROKEN[n % len(BROKEN)] for n in range(1000)]
    order = np.random.default_rng(1).permutation(len(good) + len(broken))
    create_topic(broker.bootstrap_servers, f"{topic}.dead-letter")
    send([(good + broken)[n] for n in order])
    worker = make_worker().start().wait_ready()
    worker.wait_read(4000)
    assert worker.stop() == 0
    beat = worker.heartbeat()
    tombstones = broken.count(None)
    assert int(beat["events_learned"]) == 3000
    assert int(beat["events_tombstone"]) == tombstones
    assert int(beat["events_rejected"]) == 1000 - tombstones
    reasons = {name: int(count) for name, count in beat.items() if name.startswith("rejected_")}
    assert sum(reasons.values()) == 1000 - tombstones
    assert len(reasons) >= 8
    dead = list(dead_letters(broker, f"{topic}.dead-letter", 1000 - tombstones))
    assert Counter(value for value, _ in dead) == Counter(value for value in broken if value is not None)
    by_reason = Counter(headers["freshet-reason"] for _, headers in dead)
    assert {f"rejected_{reason}": count for reason, count in by_reason.items()} == reasons
    assert {headers["freshet-topic"] for _, headers in dead} == {topic}
    assert len({headers["freshet-offset"] for _, headers in dead}) == len(dead)


def dead_letters(broker: Broker, topic: str, count: int) -> Iterator[tuple[bytes, dict[str, str]]]:
    consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest")
    consumer.assign([TopicPartition(topic, 0)])
    consumer.seek_to_beginning()
    found = []
    eventually(lambda: found.extend(r for rs in consumer.poll(200).values() for r in rs) or len(found) >= count, 30)
    consumer.close()
    assert len(found) == count
    for record in found:
        yield record.value, {name: value.decode() for name, value in record.headers}


def test_killed_and_restarted_it_counts_every_event_once_and_ends_in_the_same_state(
    make_worker: MakeWorker, send: Send, redis_client: Redis
) -> None:
    """K1: kill -9 in mid-stream, three times; bit for bit the state of a worker that was never killed."""
    values, users, items = clicks(6400)
    settings = {"runtime__deterministic": "true", "checkpoint__every_events": 900}
    killed = make_worker("killed", **settings)
    for part, until in enumerate((1600, 3200, 4800)):
        killed.start()
        send(values[1600 * part : 1600 * (part + 1)])
        killed.wait_read(until - 500 * part)
        killed.kill()
    send(values[4800:])
    killed.start()
    beat = killed.wait_read(6400)
    eventually(lambda: killed.heartbeat()["state"] == "running")
    eventually(lambda: published(redis_client, "user") == dict(users))
    eventually(lambda: published(redis_client, "item") == dict(items))
    assert int(beat["events_learned"]) == 6400
    assert int(beat["events_duplicate"]) == 0
    assert killed.stop() == 0
    whole = make_worker("whole", redis__prefix="other", **settings)
    assert whole.start("run", "--drain").wait() == 0
    a, b = (load(one.checkpoints()[0].path)[1] for one in (killed, whole))
    assert differences(a["learner"], b["learner"]) == []
    assert differences(a["ingest"], b["ingest"]) == []
    report = {name: float(value) for name, value in killed.heartbeat().items() if name.startswith("recall")}
    assert math.isfinite(report["recall_at_10"])
    assert report["recall_at_10"] > 0.1


def test_a_second_worker_on_the_same_folder_says_who_holds_it(make_worker: MakeWorker) -> None:
    first = make_worker().start().wait_ready()
    assert first.process is not None
    second = make_worker()
    assert second.start().wait() == 2
    assert f"in use by process {first.process.pid}" in second.log


def test_a_newer_worker_takes_over_and_the_older_says_so(make_worker: MakeWorker, send: Send) -> None:
    older = make_worker("older").start().wait_ready()
    newer = make_worker("newer").start().wait_ready()
    eventually(lambda: older.get("/readyz")[0] == 503)
    _, body = older.get("/readyz")
    assert "a newer worker has taken over" in body
    assert older.get("/healthz")[0] == 200
    send(clicks(100)[0])
    newer.wait_read(100)
    assert older.get("/metrics")[1].count("freshet_records_total 0.0") == 1
    assert older.stop() == 0


def test_a_worker_that_starts_before_its_topic_waits_for_it(
    make_worker: MakeWorker, broker: Broker, topic: str
) -> None:
    """K12."""
    name = f"{topic}-later"
    worker = make_worker(topic=name, kafka__metadata_max_age_ms=200).start()
    eventually(lambda: "the topic is not there yet" in worker.get("/readyz")[1], 60, worker.describe)
    assert worker.get("/healthz")[0] == 200
    create_topic(broker.bootstrap_servers, name)
    worker.wait_ready()
    assert worker.stop() == 0


def test_changed_settings_are_refused_with_both_values(make_worker: MakeWorker, send: Send) -> None:
    """M7."""
    send(clicks(200)[0])
    worker = make_worker().start().wait_ready()
    worker.wait_read(200)
    assert worker.stop() == 0
    worker.settings["FRESHET_MODEL__DIM"] = "8"
    assert worker.start().wait() == 2
    assert "model.dim is 8 in the settings, but 16 in the checkpoint" in worker.log
    assert worker.start("run", "--fresh", "--drain").wait() == 0
    assert worker.checkpoints()[0].header.model["dim"] == 8  # type: ignore[union-attr]


def test_a_file_and_kafka_make_the_same_model(make_worker: MakeWorker, send: Send) -> None:
    """The file source runs the very same loop: the figures are equal to the last digit, and so are the weights."""
    values, *_ = clicks(3000)
    send(values)
    worker = make_worker(runtime__deterministic="true")
    assert worker.start("run", "--drain").wait() == 0
    state = load(worker.checkpoints()[0].path)[1]
    model = ModelConfig(dim=16, history=10, negatives=32, batch_size=64)  # as BASE says
    settings = Settings(model=model, runtime=RuntimeSettings(device="cpu", deterministic=True))
    offline = offline_worker(settings, [(value, 1_700_000_000_000) for value in values])
    offline.run(drain=True)
    assert differences(offline.learner.state(), state["learner"]) == []
    figures = offline.report.figures()
    assert figures["recall_at_10"] == float(worker.heartbeat()["recall_at_10"])
