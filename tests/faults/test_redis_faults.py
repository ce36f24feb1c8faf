"""Redis breaks under a running worker: training goes on, and in the end everything is published."""

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from redis import Redis

from replay.local_stack import RedisServer
from tests.clicks import MakeWorker, Send, clicks, published
from tests.faults.model_in_redis import BATCH, EXACT, assert_redis_is_the_model, saved_learner, saved_outbox, versions
from tests.proxy import TcpProxy
from tests.waiting import eventually
from tests.worker_process import WorkerProcess

pytestmark = [pytest.mark.faults, pytest.mark.integration]

PART = 5 * BATCH


class Traffic:
    """Sends clicks part by part and knows what a model that counts each once must hold."""

    def __init__(self, send: Send, parts: int, users: int = 300) -> None:
        self._send, self.sent = send, 0
        self._values, self._users, self._items = clicks(parts * PART, users=users)

    def send(self, count: int = 1) -> None:
        """The next `count` parts."""
        until = self.sent + count * PART
        self._send(self._values[self.sent : until])
        self.sent = until

    @property
    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """By user and by item, of all parts, which must have been sent."""
        assert self.sent == len(self._values)
        return self._users, self._items


def learned(worker: WorkerProcess) -> float:
    return worker.metric("freshet_events_total", outcome="learned")


def assert_weather(worker: WorkerProcess, traffic: Traffic, kind: str) -> None:
    """Redis is away in this way: training goes on, health stays green, readiness and metrics tell."""
    eventually(lambda: worker.metric("freshet_publish_errors_total", kind=kind) > 0, 60, worker.describe)
    traffic.send()
    eventually(lambda: learned(worker) == traffic.sent, 60, worker.describe)
    eventually(lambda: worker.reasons().get("redis", "").startswith(f"{kind}:"), 60, worker.describe)
    assert worker.get("/readyz")[0] == 503
    assert worker.get("/healthz")[0] == 200
    backlog = eventually(lambda: worker.metric("freshet_publish_backlog", table="users"), 60, worker.describe)
    assert backlog <= 300 + 2 * 300  # one flag a user, and two updates on their way


def assert_well(worker: WorkerProcess) -> None:
    eventually(lambda: worker.get("/readyz")[0] == 200, 60, worker.describe)


@pytest.mark.quick
def test_a_line_cut_in_mid_publish_loses_nothing(
    make_worker: MakeWorker, send: Send, line: TcpProxy, line_url: str, own_client: Redis
) -> None:
    """R1: the socket is cut again and again in the middle of requests and of replies."""
    traffic = Traffic(send, 12)
    worker = make_worker(redis_url=line_url, **EXACT).start()
    traffic.send()
    worker.wait_read(traffic.sent)
    rng = np.random.default_rng(7)
    for n in range(11):
        way, most = ("to_server", 60_000) if n % 3 else ("from_server", 200)
        line.cut_after(way, int(rng.integers(0, most)))
        traffic.send()
        eventually(lambda: not line.cut_pending, 60, worker.describe)
    assert worker.metric("freshet_publish_errors_total", kind="connection") >= 1
    assert_redis_is_the_model(worker, own_client, *traffic.counts)


def test_a_server_that_became_a_replica_is_written_when_it_is_a_master_again(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis, redis_server: RedisServer
) -> None:
    """R2: READONLY in mid-publish, as after a failover; the data may be gone afterwards."""
    traffic = Traffic(send, 3)
    worker = make_worker(redis_url=own_redis.url, **EXACT).start()
    traffic.send()
    worker.wait_read(traffic.sent)
    own_client.replicaof("127.0.0.1", redis_server.port)
    assert_weather(worker, traffic, "readonly")
    own_client.replicaof("NO", "ONE")
    traffic.send()
    assert_well(worker)
    assert_redis_is_the_model(worker, own_client, *traffic.counts)


def test_a_server_that_never_answers_holds_nobody_up(
    make_worker: MakeWorker, send: Send, line: TcpProxy, line_url: str, own_client: Redis
) -> None:
    """R3: connections are accepted and what is sent is taken, and nothing ever comes back."""
    traffic = Traffic(send, 12)
    worker = make_worker(redis_url=line_url, **EXACT).start()
    traffic.send()
    worker.wait_read(traffic.sent)
    line.blackhole()
    traffic.send(9)
    assert_weather(worker, traffic, "timeout")
    line.resume()
    traffic.send()
    assert_well(worker)
    assert_redis_is_the_model(worker, own_client, *traffic.counts)


@pytest.mark.slow
def test_a_frozen_server_is_claimed_once_when_it_wakes_up(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """R3: it was frozen before the worker started; the claims that ran into their limit arrive all the same."""
    traffic = Traffic(send, 2)
    own_redis.pause()
    worker = make_worker(redis_url=own_redis.url, **EXACT).start()
    traffic.send()
    eventually(lambda: worker.metric("freshet_publish_errors_total", kind="timeout") >= 3, 90, worker.describe)
    eventually(lambda: learned(worker) == traffic.sent, 60, worker.describe)
    assert worker.get("/healthz")[0] == 200
    own_redis.resume()
    traffic.send()
    assert_well(worker)
    assert_redis_is_the_model(worker, own_client, *traffic.counts)


@pytest.mark.slow
def test_a_flushed_redis_is_filled_again_at_a_bounded_rate(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """R6: FLUSHALL while nobody clicks. A version is one write: none may carry more than a second's share of users."""
    rate = 50
    traffic = Traffic(send, 4)
    worker = make_worker(redis_url=own_redis.url, **EXACT | {"publish__background_per_s": rate}).start()
    traffic.send(4)
    users, items = traffic.counts
    worker.wait_read(traffic.sent)
    eventually(lambda: published(own_client, "user") == dict(users), 60, worker.describe)
    epoch = own_client.hget("rec:meta", "epoch")
    own_client.flushall()
    eventually(lambda: published(own_client, "user") == dict(users), 120, worker.describe)
    eventually(lambda: published(own_client, "item") == dict(items), 60, worker.describe)
    eventually(lambda: own_client.zcard("rec:popular") == len(items), 60, worker.describe)
    assert own_client.hget("rec:meta", "epoch") == epoch
    assert own_client.hgetall("rec:meta").keys() >= {b"layout", b"dim", b"dtype", b"family", b"model"}
    eventually(lambda: own_client.hget("rec:worker", "state") == b"running", 60, worker.describe)
    assert max(Counter(versions(own_client)).values()) <= rate
    assert len(worker.logged("claimed again; everything is to be published again")) == 1
    assert_well(worker)
    assert worker.stop() == 0


@pytest.mark.slow
def test_a_redis_that_was_killed_and_kept_its_data_goes_on(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """Restarted from its append-only file: no claim is lost, nothing is published all over again."""
    own_redis.stop()
    own_redis.extra_args = ("--appendonly", "yes", "--appendfsync", "always")
    own_redis.start()
    traffic = Traffic(send, 3)
    worker = make_worker(redis_url=own_redis.url, **EXACT).start()
    traffic.send()
    worker.wait_read(traffic.sent)
    own_redis.kill()
    assert_weather(worker, traffic, "connection")
    own_redis.start()
    traffic.send()
    assert_well(worker)
    assert worker.logged("claimed again; everything is to be published again") == []
    assert_redis_is_the_model(worker, own_client, *traffic.counts)


def test_a_redis_that_was_replaced_by_an_empty_one_is_filled(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """R6: killed, and restarted without its data."""
    traffic = Traffic(send, 3)
    worker = make_worker(redis_url=own_redis.url, **EXACT).start()
    traffic.send()
    worker.wait_read(traffic.sent)
    own_redis.kill()
    assert_weather(worker, traffic, "connection")
    own_redis.start()
    assert own_client.dbsize() == 0 or own_client.exists("rec:meta")
    traffic.send()
    assert_well(worker)
    assert_redis_is_the_model(worker, own_client, *traffic.counts)


def test_a_full_redis_is_written_when_there_is_room_again(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """Out of memory with noeviction."""
    traffic = Traffic(send, 3)
    worker = make_worker(redis_url=own_redis.url, **EXACT).start()
    traffic.send()
    worker.wait_read(traffic.sent)
    own_client.config_set("maxmemory-policy", "noeviction")
    own_client.config_set("maxmemory", 1)
    assert_weather(worker, traffic, "oom")
    own_client.config_set("maxmemory", 0)
    traffic.send()
    assert_well(worker)
    assert_redis_is_the_model(worker, own_client, *traffic.counts)


@pytest.mark.slow
def test_a_redis_that_reads_its_data_for_long_is_waited_for(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """LOADING: after a restart it answers, but not yet with data."""
    traffic = Traffic(send, 3)
    worker = make_worker(redis_url=own_redis.url, **EXACT).start()
    traffic.send()
    worker.wait_read(traffic.sent)
    own_client.save()
    own_redis.kill()
    # 20 ms a key: some seconds for the 400 keys or so; events are handled in between
    own_redis.extra_args = ("--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")
    own_redis.start_timeout_s = 120
    own_redis.start()  # returns when it is loaded
    assert worker.metric("freshet_publish_errors_total", kind="loading") > 0
    traffic.send(2)
    assert_well(worker)
    assert_redis_is_the_model(worker, own_client, *traffic.counts)


@pytest.mark.slow
def test_a_worker_that_starts_before_its_redis_publishes_when_it_comes(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """Redis is away at the start: the worker reads and learns, and says what is missing."""
    own_redis.stop()
    traffic = Traffic(send, 3)
    worker = make_worker(redis_url=own_redis.url, **EXACT).start()
    traffic.send()
    eventually(lambda: learned(worker) == traffic.sent, 60, worker.describe)
    assert_weather(worker, traffic, "connection")
    own_redis.start()
    traffic.send()
    assert_well(worker)
    assert_redis_is_the_model(worker, own_client, *traffic.counts)


@pytest.mark.slow
def test_a_password_that_is_set_right_later_lets_the_worker_in(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """A wrong password is told as such, is not shown, and does not stop the learning."""
    own_client.ping()  # this connection stays in
    own_client.config_set("requirepass", "the right one")
    traffic = Traffic(send, 3)
    worker = make_worker(redis_url=own_redis.url.replace("//", "//:wr0ng-s3cret@"), **EXACT).start()
    traffic.send()
    assert_weather(worker, traffic, "auth")
    own_client.config_set("requirepass", "wr0ng-s3cret")
    traffic.send()
    assert_well(worker)
    told = worker.log + worker.get("/metrics")[1] + worker.get("/readyz")[1]
    assert "wr0ng-s3cret" not in told
    with Redis(port=own_redis.port, password="wr0ng-s3cret") as client:
        assert_redis_is_the_model(worker, client, *traffic.counts)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "never answers"])
def test_a_stop_while_redis_is_away_saves_what_is_still_to_be_published(
    make_worker: MakeWorker, send: Send, line: TcpProxy, line_url: str, own_client: Redis, way: str
) -> None:
    """The next start publishes the users who clicked meanwhile, also those that were on their way; nobody else."""
    rest = EXACT | {"publish__background_per_s": 0, "runtime__grace_s": 90}
    traffic = Traffic(send, 2)
    worker = make_worker(redis_url=line_url, **rest).start()
    traffic.send()
    worker.wait_read(traffic.sent)
    eventually(lambda: published(own_client, "user").keys(), 60, worker.describe)
    eventually(lambda: worker.metric("freshet_publish_backlog", table="users") == 0, 60, worker.describe)
    line.cut() if way == "killed" else line.blackhole()
    traffic.send()
    eventually(lambda: learned(worker) == traffic.sent, 60, worker.describe)
    eventually(lambda: "redis" in worker.reasons(), 60, worker.describe)
    assert worker.stop() == 0  # within the minute that `stop` waits: not as long as the grace would allow
    assert len(saved_outbox(worker)["users"]) > 0  # type: ignore[arg-type]
    line.resume()
    worker.start()
    eventually(lambda: published(own_client, "user") == dict(traffic.counts[0]), 60, worker.describe)
    assert worker.stop() == 0


@pytest.mark.slow
def test_ids_that_come_and_go_while_redis_is_away_do_not_pile_up(
    make_worker: MakeWorker, send: Send, line: TcpProxy, line_url: str, own_client: Redis
) -> None:
    """Thousands of one-shot users pass a small table: what waits stays within the capacities."""
    capacity = 128
    small = {"model__user_capacity": capacity, "publish__background_per_s": 3000}
    worker = make_worker(redis_url=line_url, **EXACT | small).start()
    send(clicks(640, users=100)[0])
    worker.wait_read(640)
    eventually(lambda: len(published(own_client, "user")) >= 90, 60, worker.describe)
    line.blackhole()
    for wave in range(8):
        send(clicks(640, seed=wave + 1, users=640, prefix=f"once-{wave}-")[0])
    eventually(lambda: learned(worker) == 9 * 640, 120, worker.describe)
    assert worker.metric("freshet_publish_backlog", table="users") <= 3 * capacity
    assert worker.metric("freshet_evicted_total", table="users") > 10 * capacity
    assert worker.stop() == 0
    waiting = saved_outbox(worker)
    assert len(waiting["users"]) <= capacity  # type: ignore[arg-type]
    assert len(waiting["removed_users"]) <= 2 * capacity  # type: ignore[arg-type]
    line.resume()
    worker.start().wait_ready()
    eventually(lambda: len(published(own_client, "user")) <= capacity, 60, worker.describe)
    eventually(lambda: all(name.startswith("once-7-") for name in published(own_client, "user")), 60, worker.describe)
    assert worker.stop() == 0


@pytest.mark.slow
def test_a_redis_that_goes_back_in_time_does_not_bring_back_who_was_gone(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """R6: killed and restarted from an old snapshot: users who were evicted since then are in it, and go again."""
    own_redis.stop()
    own_redis.extra_args = ("--save", "3600 1000000")  # so that it reads its snapshot at a start
    own_redis.start()
    capacity = 128
    worker = make_worker(redis_url=own_redis.url, **EXACT | {"model__user_capacity": capacity}).start()
    old, new = clicks(640, users=100, prefix="old-"), clicks(1280, seed=1, users=capacity, prefix="new-")
    send(old[0])
    worker.wait_read(640)
    eventually(lambda: published(own_client, "user") == dict(old[1]), 60, worker.describe)
    own_client.save()
    send(new[0])
    worker.wait_read(1920)
    eventually(lambda: not set(old[1]) & set(published(own_client, "user")), 60, worker.describe)
    own_redis.kill()
    own_redis.start()
    assert set(old[1]) & set(published(own_client, "user"))
    eventually(lambda: published(own_client, "user").keys() == new[1].keys(), 60, worker.describe)
    eventually(lambda: worker.get("/readyz")[0] == 200, 60, worker.describe)
    assert worker.stop() == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_in_an_outage_publishes_after_it(
    make_worker: MakeWorker, send: Send, line: TcpProxy, line_url: str, own_client: Redis
) -> None:
    """kill -9 while Redis is away, twice: nothing is lost, nothing counts twice."""
    traffic = Traffic(send, 4)
    worker = make_worker(redis_url=line_url, **EXACT | {"checkpoint__every_events": 100}).start()
    traffic.send()
    worker.wait_read(traffic.sent)
    line.cut()
    for _ in range(2):
        traffic.send()
        eventually(lambda: worker.metric("freshet_position") == traffic.sent, 60, worker.describe)
        worker.kill()
        worker.start()
    line.resume()
    traffic.send()
    worker.wait_read(traffic.sent)
    users, items = traffic.counts
    eventually(lambda: published(own_client, "user") == dict(users), 120, worker.describe)
    eventually(lambda: published(own_client, "item") == dict(items), 60, worker.describe)
    assert worker.stop() == 0


LANGUAGES = {"node": "read_vectors.mjs", "perl": "read_vectors.pl"}


@pytest.mark.parametrize("language", [name for name in LANGUAGES if shutil.which(name)] or ["node"])
def test_another_language_reads_the_same_floats_and_ranks_the_same(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis, language: str
) -> None:
    """R5: little-endian float32, exactly 4 * dim bytes; read with a bare socket, the model's own vectors and scores."""
    values, users, items = clicks(640)
    send(values)
    worker = make_worker(redis_url=own_redis.url, **EXACT).start()
    assert_redis_is_the_model(worker, own_client, users, items)
    learner, names = saved_learner(worker), sorted(items)
    script = Path(__file__).with_name(LANGUAGES[language])
    command = [language, str(script), str(own_redis.port), "u1", *names]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert (told["dim"], told["dtype"], told["metric"]) == (83, "float32le", "dot")
    user = np.array(told["user"], np.uint32).view(np.float32)
    vectors = np.array(told["items"], np.uint32).view(np.float32)
    assert user.tobytes() == np.frombuffer(own_client.hget("rec:user:u1", "vector"), "<f4").tobytes()
    (model_user,) = learner.user_vectors(learner.users.lookup(["u1"]))
    model_items = learner.item_vectors()[learner.items.lookup(names)]
    np.testing.assert_allclose(user, model_user, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(vectors, model_items, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(told["scores"], model_items @ model_user, rtol=1e-3, atol=1e-4)
