"""A model through rollbacks, fresh starts and replays from a time; two of them side by side on one topic."""

import time
from datetime import UTC, datetime

import pytest
from kafka import KafkaProducer
from redis import Redis

from replay.local_stack import Broker
from tests.clicks import MakeWorker, Send, clicks, published
from tests.consistency import inconsistencies
from tests.streams import differences
from tests.waiting import eventually
from tests.worker_process import WorkerProcess
from worker.checkpoint import load

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.slow]


def saved_state(worker: WorkerProcess, number: int = 0) -> dict:
    """Of the `number`-th newest checkpoint, which must be of one moment."""
    saved, state = load(worker.checkpoints()[number].path)
    assert inconsistencies(saved, state) == []
    return state


def records(worker: WorkerProcess) -> list[int]:
    """Of each checkpoint, newest first."""
    return [saved.header.records for saved in worker.checkpoints() if saved.header]


def test_a_rollback_reads_the_stream_again_and_ends_in_the_same_state(make_worker: MakeWorker, send: Send) -> None:
    """By number, and by a path outside the folder; it saves at once, so that a crash does not undo it."""
    values, _users, _ = clicks(1600)
    worker = make_worker(runtime__deterministic="true", checkpoint__keep=100, kafka__dead_letter_suffix="")
    for part in (values[:700], [*values[700:], b"{"]):
        send(part)
        assert worker.start("run", "--drain").wait() == 0
    assert records(worker)[:2] == [1601, 700]
    end, older = saved_state(worker), worker.checkpoints()[1]
    assert worker.start("run", "--checkpoint", str(older.serial), "--drain").wait() == 0
    assert [line["records"] for line in worker.logged("resumed")] == [700]
    assert records(worker)[0] == 1601
    assert differences(saved_state(worker)["learner"], end["learner"]) == []
    assert differences(saved_state(worker)["ingest"], end["ingest"]) == []

    backup = worker.home / "copy of a checkpoint.pt"
    backup.write_bytes(older.path.read_bytes())
    worker.settings["FRESHET_CHECKPOINT__EVERY_S"] = "3600"
    serial = worker.checkpoints()[0].serial
    worker.start("run", "--checkpoint", str(backup))
    eventually(lambda: worker.checkpoints()[0].serial > serial, 60, worker.describe)
    worker.wait_read(1601)
    worker.kill()
    assert worker.start("run", "--drain").wait() == 0
    assert worker.logged("resumed")[0]["checkpoint"].endswith(f"checkpoint-{serial + 1:010}.pt")
    assert differences(saved_state(worker)["learner"], end["learner"]) == []


def test_a_checkpoint_that_is_not_there_or_damaged_is_no_rollback(make_worker: MakeWorker, send: Send) -> None:
    send(clicks(100)[0])
    worker = make_worker()
    assert worker.start("run", "--drain").wait() == 0
    assert worker.start("run", "--checkpoint", "77").wait() == 2
    assert "error: there is no checkpoint '77'" in worker.log
    damaged = worker.home / "damaged.pt"
    damaged.write_bytes(worker.checkpoints()[0].path.read_bytes()[:-1])
    assert worker.start("run", "--checkpoint", str(damaged)).wait() == 2
    assert f"error: {damaged}: cut short" in worker.log
    assert len(records(worker)) <= 2


def test_a_replay_from_a_time_needs_a_fresh_start(
    make_worker: MakeWorker, broker: Broker, topic: str, redis_client: Redis
) -> None:
    """With a checkpoint it would count events twice, so it has to be said; then nothing of before is left."""
    values, *_ = clicks(300)
    later, users, _ = clicks(200, seed=1, prefix="later-")
    now_ms = int(time.time() * 1000)
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, acks="all")
    for shift_ms, part in ((-7_200_000, values), (-1_800_000, later)):
        for value in part:
            producer.send(topic, value, timestamp_ms=now_ms + shift_ms)
        producer.flush()
    producer.close()
    worker = make_worker()
    assert worker.start("run", "--drain").wait() == 0
    before = records(worker)
    an_hour_ago = datetime.fromtimestamp(now_ms / 1000 - 3600, UTC).isoformat()
    assert worker.start("run", "--from-timestamp", an_hour_ago).wait() == 2
    assert "--fresh" in worker.log
    assert "count events twice" in worker.log
    assert records(worker) == before
    assert worker.start("run", "--from-timestamp", "yesterday").wait() == 2
    assert "error: --from-timestamp: 'yesterday' is no ISO-8601 time" in worker.log
    worker.start("run", "--fresh", "--from-timestamp", an_hour_ago).wait_read(200)
    eventually(lambda: published(redis_client, "user") == dict(users), 60, worker.describe)
    assert worker.stop() == 0
    state = load(worker.checkpoints()[0].path)[1]
    assert (state["ingest"]["records"], state["learner"]["events"]) == (200, 200)


def test_two_workers_with_their_own_prefix_and_folder_run_side_by_side_on_one_topic(
    make_worker: MakeWorker, send: Send, redis_client: Redis
) -> None:
    """A/B: each has the whole stream, and neither disturbs the other, whenever it starts."""
    values, users, items = clicks(900)
    send(values[:300])
    one = make_worker("one").start().wait_ready()
    other = make_worker("other", redis__prefix="b", model__family="mf", model__dim=8, kafka__group_id="b").start()
    send(values[300:600])
    other.wait_ready()
    send(values[600:])
    for worker in (one, other):
        worker.wait_read(900)
        eventually(lambda w=worker: published(redis_client, "user", w.prefix) == dict(users), 60, worker.describe)
        eventually(lambda w=worker: published(redis_client, "item", w.prefix) == dict(items), 60, worker.describe)
        assert worker.get("/readyz")[0] == 200
    assert (redis_client.hget("rec:meta", "dim"), redis_client.hget("b:meta", "dim")) == (b"83", b"75")
    for worker in (one, other):
        assert worker.stop() == 0
        saved_state(worker)
