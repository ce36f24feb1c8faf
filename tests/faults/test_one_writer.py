"""One writer: the newest worker owns what is published, whatever the older ones still try; vectors never go back."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from kafka import KafkaConsumer, TopicPartition
from redis import Redis

from replay.local_stack import Broker, RedisServer, free_port
from tests.clicks import MakeWorker, Send, clicks, published
from tests.faults.model_in_redis import EXACT, assert_redis_is_the_model
from tests.proxy import TcpProxy
from tests.waiting import eventually
from tests.worker_process import WorkerProcess
from worker.events import encode

pytestmark = [pytest.mark.faults, pytest.mark.integration]


def learned(worker: WorkerProcess) -> float:
    return worker.metric("freshet_events_total", outcome="learned")


def epochs(client: Redis, prefix: str = "rec") -> set[int]:
    """Of everything that is published."""
    keys = [k for kind in ("user", "item") for k in client.scan_iter(match=f"{prefix}:{kind}:*", count=1000)]
    return {int(client.hget(key, "epoch") or 0) for key in [*keys, f"{prefix}:meta", f"{prefix}:worker"]}


def owner(client: Redis, prefix: str = "rec") -> int:
    return int(client.hget(f"{prefix}:meta", "epoch") or 0)


def epoch(worker: WorkerProcess) -> int:
    return int(eventually(lambda: worker.metric("freshet_epoch"), 60, worker.describe))


def superseded(worker: WorkerProcess) -> str:
    """Wait until it is; the message."""
    return eventually(lambda: worker.reasons().get("superseded"), 60, worker.describe)


def all_of(client: Redis) -> dict[bytes, bytes]:
    """Every key with all that it holds."""
    return {key: client.dump(key) for key in client.scan_iter(count=1000)}


def committed(broker: Broker, topic: str, group: str = "freshet") -> int | None:
    consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap_servers, group_id=group, enable_auto_commit=False)
    try:
        found: int | None = consumer.committed(TopicPartition(topic, 0))
        return found
    finally:
        consumer.close()


@pytest.mark.quick
def test_the_newer_worker_goes_on_and_the_older_touches_nothing_any_more(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str, own_redis: RedisServer, own_client: Redis
) -> None:
    """R4: the older stops learning and publishing, stays up, names the newer one; its stop writes nothing."""
    values, users, items = clicks(1280)
    settings = EXACT | {"checkpoint__every_events": 100, "runtime__grace_s": 120}
    older = make_worker("older", redis_url=own_redis.url, **settings).start()
    send(values[:640])
    older.wait_read(640)
    newer = make_worker("newer", redis_url=own_redis.url, **settings).start()
    message = superseded(older)
    assert f"(epoch {epoch(newer)}, " in message
    assert f":{newer.process.pid})" in message
    assert epoch(newer) > epoch(older)
    eventually(lambda: older.reasons() == {"superseded": message}, 60, older.describe)
    send(values[640:])
    newer.wait_read(1280)
    eventually(lambda: epochs(own_client) == {epoch(newer)}, 60, newer.describe)
    eventually(lambda: committed(broker, topic) == 1280, 60, newer.describe)
    assert learned(older) == 640
    assert older.get("/healthz")[0] == 200
    assert older.get("/readyz")[0] == 503
    newer.signal(signal.SIGSTOP)  # so that whatever changes now was not the newer one
    before = all_of(own_client)
    assert older.stop() == 0  # within the minute that `stop` waits: not as long as the grace would allow
    assert all_of(own_client) == before
    assert committed(broker, topic) == 1280
    newer.signal(signal.SIGCONT)
    assert_redis_is_the_model(newer, own_client, users, items)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["nothing", "keys", "everything"])
def test_a_worker_that_was_frozen_wakes_up_and_cannot_write(
    make_worker: MakeWorker,
    send: Send,
    own_redis: RedisServer,
    own_client: Redis,
    line: TcpProxy,
    line_url: str,
    lost: str,
) -> None:
    """R4: SIGSTOP with a write under way, a newer worker, SIGCONT: the late writes are refused on the server, also to
    keys that were evicted or never written, also after Redis was flushed.
    """
    values, users, items = clicks(960)
    older = make_worker("older", redis_url=line_url, **EXACT).start()
    send(values[:320])
    older.wait_read(320)
    line.blackhole()  # what the older one sends from here on is under way, and arrives late
    send([encode("never written", "i1")] * 320)
    eventually(lambda: learned(older) == 640, 60, older.describe)
    older.signal(signal.SIGSTOP)
    newer = make_worker("newer", redis_url=own_redis.url, **EXACT).start()
    newer.wait_read(640)
    send(values[320:640])
    newer.wait_read(960)
    eventually(lambda: published(own_client, "user").get("never written") == 320, 60, newer.describe)
    eventually(lambda: epochs(own_client) == {owner(own_client)}, 60, newer.describe)
    assert owner(own_client) == epoch(newer)
    newer.signal(signal.SIGSTOP)  # what is written now is not the newer one's
    gone = {"nothing": [], "keys": ["rec:user:never written", "rec:user:u1", "rec:item:i1", "rec:popular"]}
    if lost == "everything":
        own_client.flushall()
    elif gone[lost]:
        own_client.unlink(*gone[lost])
    before = all_of(own_client)
    line.resume()
    older.signal(signal.SIGCONT)
    if lost == "everything":
        # nobody is there to refuse it: it waits, because it was away, and the newer one is
        eventually(lambda: "claim" in older.reasons().get("redis", ""), 60, older.describe)
        assert published(own_client, "user") == {}
    else:
        superseded(older)
        assert all_of(own_client) == before
    newer.signal(signal.SIGCONT)
    assert f"(epoch {epoch(newer)}, " in superseded(older)
    before_the_end = learned(older)
    send(values[640:])
    newer.wait_read(1280)
    assert learned(older) == before_the_end
    users["never written"], items["i1"] = 320, items["i1"] + 320
    eventually(lambda: epochs(own_client) == {epoch(newer)}, 60, newer.describe)
    assert older.stop() == 0
    assert_redis_is_the_model(newer, own_client, users, items)


@pytest.mark.slow
def test_a_superseded_worker_that_is_started_again_takes_over_again(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """Its operator's choice; it counts on from its own checkpoint, and each event once."""
    values, users, items = clicks(1920)
    one = make_worker("one", redis_url=own_redis.url, **EXACT).start()
    send(values[:640])
    one.wait_read(640)
    two = make_worker("two", redis_url=own_redis.url, **EXACT).start()
    superseded(one)
    send(values[640:1280])
    two.wait_read(1280)
    assert one.stop() == 0
    one.start()
    assert f"(epoch {epoch(one)}, " in superseded(two)
    send(values[1280:])
    one.wait_read(1920)
    assert two.stop() == 0
    eventually(lambda: epochs(own_client) == {epoch(one)}, 60, one.describe)
    assert_redis_is_the_model(one, own_client, users, items)


@pytest.mark.slow
def test_two_workers_with_a_prefix_a_group_and_a_folder_each_do_not_disturb_each_other(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str, own_redis: RedisServer, own_client: Redis
) -> None:
    """A/B on one topic: both learn every event; one is killed and its keys are deleted, the other is as before."""
    values, users, items = clicks(1280)
    settings = EXACT | {"checkpoint__every_events": 100}
    a, b = (
        make_worker(name, redis_url=own_redis.url, redis__prefix=name, kafka__group_id=name, **settings).start()
        for name in ("a", "b")
    )
    send(values[:640])
    for worker in (a, b):
        worker.wait_read(640)
    a.kill()
    own_client.unlink(*own_client.keys("a:*"))
    send(values[640:])
    b.wait_read(1280)
    b.wait_ready()
    assert b.logged("claimed again; everything is to be published again") == []
    a.start().wait_read(1280)
    eventually(lambda: (committed(broker, topic, "a"), committed(broker, topic, "b")) == (1280, 1280), 60)
    a.wait_ready()
    b.wait_ready()
    for worker in (a, b):
        assert_redis_is_the_model(worker, own_client, users, items)
    for name in users:
        one, other = (np.frombuffer(own_client.hget(f"{prefix}:user:{name}", "vector"), "<f4") for prefix in "ab")
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# ---- published vectors do not go back


@contextmanager
def watched(url: str, names: list[str]) -> Iterator[Callable[[], list[str]]]:
    """A reader that looks at users all the time; gives a function that says what went back."""
    wrong: list[str] = []
    ended = threading.Event()
    looks = 0

    def look(client: Redis, newest: dict[str, tuple[int, int, int]]) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hmget(f"rec:user:{name}", "epoch", "version", "events")
            found = pipeline.execute()
        for name, fields in zip(names, found, strict=True):
            now = tuple(int(field or 0) for field in fields)
            before = newest.get(name, (0, 0, 0))
            if now[:2] < before[:2] or now[2] < before[2]:
                wrong.append(f"{name}: {before} -> {now}")
            newest[name] = now

    def run() -> None:
        nonlocal looks
        newest: dict[str, tuple[int, int, int]] = {}
        with Redis.from_url(url) as client:
            while not ended.is_set():
                look(client, newest)
                looks += 1
                time.sleep(0.001)

    def told() -> list[str]:
        assert looks > 10
        return wrong

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
def test_published_vectors_do_not_go_back_over_kills_and_restarts(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """Invariant 3: what a reader has seen of a user only grows, although each start is at an older checkpoint; even a
    worker that has lost its checkpoints publishes nothing before it has caught up.
    """
    values, users, _ = clicks(3840, users=100)
    worker = make_worker(redis_url=own_redis.url, **EXACT | {"checkpoint__every_events": 500})
    with watched(own_redis.url, [f"u{n}" for n in range(100)]) as wrong:
        for life in range(4):
            worker.start()
            send(values[960 * life : 960 * life + 480])
            worker.wait_read(960 * life + 480)
            send(values[960 * life + 480 : 960 * life + 960])
            eventually(lambda life=life: worker.metric("freshet_position") > 960 * life + 480, 60, worker.describe)
            worker.kill()
            assert wrong() == []
            if life == 2:
                shutil.rmtree(worker.home / "checkpoints")
        worker.start().wait_ready()
        eventually(lambda: worker.logged("swept"), 60, worker.describe)
        assert published(own_client, "user") == dict(users)
        assert wrong() == []
    assert worker.stop() == 0


@pytest.mark.slow
def test_a_stop_while_catching_up_publishes_nothing_and_does_not_wait(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """Readers have seen more than this model, and Kafka is away: nothing may be published, nothing waited for."""
    send(clicks(640)[0])
    worker = make_worker(redis_url=own_redis.url, **EXACT | {"runtime__grace_s": 120}).start()
    worker.wait_read(640)
    assert worker.stop() == 0
    seen = own_client.hget("rec:worker", "positions").replace(b"640", b"1000")  # by another worker, which is gone
    own_client.hset("rec:worker", "positions", seen)
    before = epochs(own_client)
    worker.settings["FRESHET_KAFKA__BOOTSTRAP_SERVERS"] = f"127.0.0.1:{free_port()}"
    worker.start()
    eventually(lambda: worker.reasons().keys() == {"catching_up", "kafka"}, 60, worker.describe)
    assert worker.get("/healthz")[0] == 200
    assert worker.stop() == 0  # within the minute that `stop` waits: not as long as the grace would allow
    assert epochs(own_client) == before | {owner(own_client)}
    assert own_client.hget("rec:user:u1", "epoch") == str(min(before)).encode()
    assert own_client.hget("rec:worker", "positions") == seen


# ---- the sweep


@pytest.mark.slow
def test_what_only_older_workers_wrote_goes_after_a_fresh_start(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """--fresh from the end of the topic: the new model has none of the old ids, and their keys disappear."""
    send(clicks(640)[0])
    worker = make_worker(redis_url=own_redis.url, kafka__start="latest", **EXACT)
    worker.settings["FRESHET_KAFKA__START"] = "earliest"
    worker.start().wait_read(640)
    assert worker.stop() == 0
    assert published(own_client, "user")
    worker.settings["FRESHET_KAFKA__START"] = "latest"
    worker.start("run", "--fresh").wait_ready()
    values, users, items = clicks(640, seed=1, prefix="new-")
    send(values)
    worker.wait_read(640)
    eventually(lambda: published(own_client, "user") == dict(users), 60, worker.describe)
    eventually(lambda: published(own_client, "item") == dict(items), 60, worker.describe)
    assert worker.stop() == 0


@pytest.mark.slow
def test_a_fresh_start_keeps_the_old_vectors_until_it_has_caught_up(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """--fresh from the beginning: readers see no user vanish and no count go back, before everything is new."""
    values, users, _ = clicks(3200, users=100)
    send(values)
    worker = make_worker(redis_url=own_redis.url, **EXACT).start()
    worker.wait_read(3200)
    eventually(lambda: published(own_client, "user") == dict(users), 60, worker.describe)
    assert worker.stop() == 0
    first = owner(own_client)
    with watched(own_redis.url, list(users)) as wrong:
        worker.start("run", "--fresh").wait_read(3200)
        eventually(lambda: worker.logged("swept"), 60, worker.describe)
        assert wrong() == []
    assert first not in epochs(own_client)
    assert worker.stop() == 0
