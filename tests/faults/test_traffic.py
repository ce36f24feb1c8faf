"""What producers and people send: everything twice, every kind of time, floods, strangers, wrong settings."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from kafka import KafkaProducer
from redis import Redis

from model.learner import OnlineLearner
from replay.local_stack import Broker, create_topic
from tests.clicks import MakeWorker, Send, clicks, published, send_all
from tests.streams import batch, clustered, differences, small_config
from tests.waiting import eventually
from tests.worker_process import SECRET_MARK, WorkerProcess
from worker.checkpoint import load
from worker.events import encode

pytestmark = pytest.mark.faults
integration = pytest.mark.integration
slow = pytest.mark.slow


# ---- T1: everything twice


@integration
@slow
def test_a_topic_that_is_replayed_counts_once_also_across_a_restart(
    make_worker: MakeWorker, send: Send, redis_client: Redis
) -> None:
    """T1: a whole replay, then single repetitions among new events; in the end the state of one who never saw them."""
    values, users, items = clicks(3200)
    settings = {"runtime__deterministic": "true"}
    rng = np.random.default_rng(1)
    twice = [value for value in values[1600:] for _ in range(rng.integers(1, 4))]
    twice += [values[n] for n in rng.integers(0, 3200, 100)]
    send([*values[:1600], *values[:1600]])
    worker = make_worker(**settings).start()
    worker.wait_read(3200)
    assert worker.stop() == 0
    send(twice)
    worker.start()
    beat = worker.wait_read(3200 + len(twice))
    assert (int(beat["events_learned"]), int(beat["events_duplicate"])) == (3200, len(twice))
    eventually(lambda: published(redis_client, "user") == dict(users))
    eventually(lambda: published(redis_client, "item") == dict(items))
    assert worker.stop() == 0
    once = make_worker("once", topic=once_topic(worker, values), redis__prefix="once", **settings)
    assert once.start("run", "--drain").wait() == 0
    one, other = (load(each.checkpoints()[0].path)[1] for each in (worker, once))
    assert differences(one["learner"], other["learner"]) == []


def once_topic(worker: WorkerProcess, values: list[bytes | None]) -> str:
    """A topic beside the worker's that holds each value once."""
    servers, topic = (worker.settings[f"FRESHET_KAFKA__{name}"] for name in ("BOOTSTRAP_SERVERS", "TOPICS"))
    create_topic(servers, f"{topic}-once")
    send_all(servers, f"{topic}-once", values)
    return f"{topic}-once"


# ---- T2: every kind of time


@integration
def test_times_of_every_kind_are_tolerated_and_histories_are_in_order_of_arrival(
    make_worker: MakeWorker, broker: Broker, topic: str, redis_client: Redis
) -> None:
    """T2: seconds, milliseconds, microseconds, texts; shuffled by an hour; old records; ten years ahead is rejected."""
    now_ms = int(time.time() * 1000)  # Kafka deletes what is older than its retention
    rng = np.random.default_rng(2)
    shuffled = [now_ms + int(shift) for shift in rng.integers(-3_600_000, 3_600_000, 400)]
    kinds = [
        lambda ms: ms,
        lambda ms: ms / 1000,
        lambda ms: ms * 1000,
        lambda ms: datetime.fromtimestamp(ms / 1000, UTC).isoformat(),
    ]
    times = [kinds[n % 4](ms) for n, ms in enumerate(shuffled)]
    good = [{"user_id": f"u{n % 7}", "item_id": f"i{n}", "timestamp": at} for n, at in enumerate(times)]
    ahead = now_ms + 10 * 365 * 86_400_000
    bad = [{"user_id": "u0", "item_id": "i0", "timestamp": kind(ahead)} for kind in kinds]
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
    for event in [*good[:200], *bad, *good[200:]]:
        producer.send(topic, json.dumps(event).encode(), timestamp_ms=now_ms)
    for old_ms in (0, 1, 100_000_000_000, now_ms - 10 * 365 * 86_400_000):  # Kafka's own time, which the event takes
        producer.send(topic, encode("of old", "i0"), timestamp_ms=old_ms)
    producer.flush()
    producer.close()
    worker = make_worker(kafka__dead_letter_suffix="").start().wait_ready()
    beat = worker.wait_read(408)
    assert (beat["events_learned"], beat["rejected_future_timestamp"]) == ("404", "4")
    expected = {f"u{user}": [e["item_id"] for e in good if e["user_id"] == f"u{user}"][::-1] for user in range(7)}
    for user, items in expected.items():
        recent = eventually(lambda key=f"rec:user:{user}": redis_client.hget(key, "recent"))
        assert json.loads(recent) == items[:50]
    beat = eventually(lambda: worker.heartbeat() if "freshness_p99_ms" in worker.heartbeat() else None)
    assert 0 <= float(beat["freshness_p50_ms"]) <= float(beat["freshness_p99_ms"]) < float("inf")
    assert worker.metric("freshet_freshness_seconds_count") == 404


# ---- T3: floods


@integration
@slow
def test_one_user_with_a_hundred_thousand_clicks_and_one_item_with_half_of_all_starve_nobody(
    make_worker: MakeWorker, send: Send, redis_client: Redis
) -> None:
    """T3: every hundredth event is somebody else's; they are published on the way, in the order they came."""
    flood = [encode("flood", "the hit" if n % 2 else f"i{n % 500}") for n in range(100_000)]
    others = [encode(f"other-{n}", f"i{n % 500}") for n in range(1000)]
    send([value for n, other in enumerate(others) for value in (*flood[100 * n : 100 * (n + 1)], other)])
    settings = {"publish__background_per_s": 0, "publish__item_tolerance": 0, "evaluation__share": 0.01}
    worker = make_worker(checkpoint__every_s=5, **settings).start()
    worker.wait_read(101_000)
    everybody = {"flood": 100_000} | {f"other-{n}": 1 for n in range(1000)}
    eventually(lambda: published(redis_client, "user") == everybody, 120, worker.describe)
    versions = [int(redis_client.hget(f"rec:user:other-{n}", "version") or 0) for n in range(1000)]
    assert versions == sorted(versions)
    assert len(set(versions)) > 10, "they went with the stream, not after the flood"
    recent = json.loads(redis_client.hget("rec:user:flood", "recent"))  # type: ignore[arg-type]
    assert len(recent) == 50
    assert recent[::2] == ["the hit"] * 25
    eventually(lambda: redis_client.zscore("rec:popular", "the hit"))
    assert redis_client.zrevrange("rec:popular", 0, 0) == [b"the hit"]
    eventually(lambda: published(redis_client, "item")["the hit"] == 50_000)
    for text in (worker.get("/metrics")[1], json.dumps(worker.heartbeat())):
        assert "nan" not in text.lower()
        assert len(text) < 100_000
    assert worker.stop() == 0
    log = load(worker.checkpoints()[0].path)[1]["learner"]["log"]
    assert int(log["size"].max()) <= 1024, "of the flood the newest 1,000 are kept"
    assert len(log["arena"]) < 2 * (2048 + 8 * 1001)


def test_a_flood_costs_no_memory_and_leaves_the_others_vectors_as_good_as_they_were() -> None:
    """T3: every second event is one user's click on one item, which is half of all clicks and of all replay."""
    events = clustered(6000, users=60)
    users = [user for own in events.users for user in (own, "flood")]
    items = [item for own in events.items for item in (own, "the hit")]
    config = small_config(batch_size=64, negatives=64, history=20, seen_items=20)
    learner = OnlineLearner(config, torch.device("cpu"), ranked_share=0.0)
    learner.observe(batch(users, items))
    assert np.mean([share_in_cluster(learner, user) for user in range(60)]) > 0.8  # by chance a quarter
    assert float(learner.figures.skipped) == 0
    assert torch.isfinite(learner.family.item_tables["items"].weight).all()
    entries = len(learner.log.arena)
    learner.observe(batch(["flood"] * 5000, ["the hit"] * 5000))
    assert len(learner.log.arena) == entries


def share_in_cluster(learner: OnlineLearner, user: int) -> float:
    """Of the ten best items, "the hit" left out, how many are of the user's cluster."""
    scores = (learner.user_vectors(learner.users.lookup([f"u{user}"])) @ learner.item_vectors().T)[0]
    names = learner.items.ids
    best = [names[row] for row in np.argsort(-scores) if names[row] and names[row] != "the hit"][:10]
    return float(np.mean([int(name[1:]) % 4 == user % 4 for name in best if name]))


# ---- T4: strangers


@slow
def test_ten_million_one_shot_users_fit_into_the_memory_of_two_hundred_thousand() -> None:
    """T4: from two million to ten, nothing grows: neither the tables nor the process."""
    command = [sys.executable, "-m", "tests.faults.one_shot_users", "10000000", "2000000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["events"] for each in figures] == [2_000_000 * n for n in range(1, 6)]
    assert {each["users"] for each in figures} <= set(range(190_000, 200_001))
    assert len({each["log_entries"] for each in figures}) == 1
    growth = [each["rss_mb"] - figures[0]["rss_mb"] for each in figures]
    assert max(growth) < 40, growth  # eight million ids in a dict would take over a thousand


def test_regular_users_are_served_as_well_among_strangers() -> None:
    """T4: nine of ten events are by users who come once and click at random; planted clusters are found anyway."""
    rng = np.random.default_rng(0)
    regular = clustered(3000, users=60)
    users, items = [], []
    for n, (user, item) in enumerate(zip(regular.users, regular.items, strict=True)):
        users += [user, *(f"stranger-{n}-{k}" for k in range(9))]
        items += [item, *(f"i{k}" for k in rng.integers(0, 80, 9))]
    config = small_config(batch_size=64, negatives=64, history=20, seen_items=20, user_capacity=10_000)
    shares = {}
    for name, stream in (("alone", regular), ("among strangers", batch(users, items))):
        learner = OnlineLearner(config, torch.device("cpu"), ranked_share=0.0)
        learner.observe(stream)
        assert learner.users.lookup([f"u{n}" for n in range(60)]).all(), "who comes back stays"
        shares[name] = float(np.mean([share_in_cluster(learner, n) for n in range(60)]))
    assert shares["alone"] > 0.8
    assert shares["among strangers"] > 0.8 * shares["alone"], shares


# ---- T6: wrong settings

SECRET = f"{SECRET_MARK}-of-t6"


@pytest.fixture
def make_idle(tmp_path: Path) -> Iterator[MakeWorker]:
    """Makes workers that come to nothing: no server is where they look."""
    made: list[WorkerProcess] = []

    def make(**settings: object) -> WorkerProcess:
        url = str(settings.pop("redis__url", "redis://127.0.0.1:1"))
        made.append(WorkerProcess(tmp_path, "127.0.0.1:1", "clicks", url, **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.__exit__(None, None, None)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def refused(worker: WorkerProcess) -> str:
    """The worker does not start; what it says: one line, no traceback, no secret."""
    assert worker.start().wait() == 2
    errors = [line for line in worker.log.splitlines() if not line.startswith("{")]
    assert len(errors) == 1, worker.log
    assert errors[0].startswith("error: ")
    assert SECRET not in worker.log
    return errors[0]


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "URL": ({"redis__url": f"http://:{SECRET}@localhost"}, "FRESHET_REDIS__URL: allowed: redis://"),
    "port of URL": ({"redis__url": f"redis://:{SECRET}@localhost:port"}, "FRESHET_REDIS__URL: allowed: redis://"),
    "port": ({"http__port": 99_999}, "FRESHET_HTTP__PORT=99999: "),
    "host": ({"http__host": "192.0.2.1"}, "FRESHET_HTTP__HOST"),
    "name": ({"kafka__topic": "x"}, "did you mean FRESHET_KAFKA__TOPICS?"),
    "device": ({"runtime__device": "cuda:63"}, "FRESHET_RUNTIME__DEVICE"),
    "mechanism": (
        {
            "kafka__security_protocol": "SASL_SSL",
            "kafka__sasl_mechanism": "OAUTHBEARER",
            "kafka__sasl_username": "freshet",
            "kafka__sasl_password": SECRET,
        },
        "FRESHET_KAFKA__SASL_MECHANISM=OAUTHBEARER: ",
    ),
    "authority": (
        {"kafka__security_protocol": "SSL", "kafka__ssl_cafile": "/no/such/file", "kafka__ssl_password": SECRET},
        "kafka.ssl_cafile",
    ),
    "authority of Redis": (
        {"redis__url": f"rediss://:{SECRET}@localhost", "redis__ssl_cafile": "/no/such/file"},
        "FRESHET_REDIS__SSL_CAFILE",
    ),
    "types": ({"events__types": '{"forget": {}}'}, "'forget' erases a user"),
    "field map": ({"events__fields": '{"user": "$.a"}'}, "unknown field 'user'"),
    "path": ({"events__fields": '{"user_id": "a"}'}, "is no path"),
    "capacity": ({"model__user_capacity": 10}, "at least twice batch_size"),
}


LATE = {"host", "device", "authority", "authority of Redis"}  # found out when more has been loaded


@pytest.mark.parametrize("wrong", [pytest.param(wrong, marks=[slow] * (wrong in LATE)) for wrong in WRONG])
def test_a_wrong_setting_stops_the_start_with_its_name(make_idle: MakeWorker, wrong: str) -> None:
    """T6."""
    settings, shown = WRONG[wrong]
    assert shown in refused(make_idle(**settings))


def test_a_port_that_is_taken_is_named(make_idle: MakeWorker, taken_port: int) -> None:
    """T6."""
    line = refused(make_idle(http__port=taken_port))
    assert str(taken_port) in line
    assert "FRESHET_HTTP__PORT" in line


def test_a_checkpoint_folder_that_is_a_file_is_named(make_idle: MakeWorker, tmp_path: Path) -> None:
    """T6."""
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} cannot be used" in refused(make_idle(checkpoint__dir=tmp_path / "file"))


@integration
def test_a_password_in_a_url_shows_nowhere(make_worker: MakeWorker, redis_url: str) -> None:
    """T6: the server refuses it, which every way of telling has to tell, and none may show it."""
    url = redis_url.replace("redis://", f"redis://someone:{SECRET}@")
    worker = make_worker(redis_url=url, log__level="debug", kafka__sasl_password=SECRET).start()
    eventually(lambda: "redis" in worker.reasons(), 60, worker.describe)
    eventually(lambda: worker.metric("freshet_publish_errors_total", kind="auth") > 0, 60, worker.describe)
    for path in ("/readyz", "/healthz", "/metrics", "/"):
        assert SECRET not in worker.get(path)[1]
    for command in ("config", "check"):
        done = subprocess.run(
            [sys.executable, "-m", "worker", command], env=worker.settings, capture_output=True, text=True, check=False
        )
        assert SECRET not in done.stdout + done.stderr
        assert "***" in done.stdout or command == "check"
    assert worker.stop() == 0
    assert SECRET not in worker.log
