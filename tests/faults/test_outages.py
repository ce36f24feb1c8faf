"""Kafka and Redis are away, each alone and both together: the worker goes on with what it can, and recovers unaided."""

from collections.abc import Callable, Iterator

import pytest
from redis import Redis

from replay.local_stack import Broker, KafkaBroker, RedisServer, create_topic, free_port
from tests.clicks import MakeWorker, clicks, published, send_all
from tests.faults.model_in_redis import BATCH, EXACT, assert_redis_is_the_model
from tests.waiting import eventually
from tests.worker_process import WorkerProcess

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.slow]

PART = 5 * BATCH
SETTINGS = EXACT | {"checkpoint__every_events": 200, "kafka__request_timeout_ms": 2000}


@pytest.fixture
def down(breakable_broker: Broker) -> Callable[[], None]:
    """Ends the broker: by kill -9 where that loses nothing that was acknowledged."""
    return breakable_broker.kill if isinstance(breakable_broker, KafkaBroker) else breakable_broker.stop


@pytest.fixture
def stream(breakable_broker: Broker, request: pytest.FixtureRequest) -> Iterator[str]:
    """A topic of its own on the broker that may be broken."""
    name = f"outage-{request.node.originalname}"
    create_topic(breakable_broker.bootstrap_servers, name)
    yield name
    if not breakable_broker.running:
        breakable_broker.start()


def reasons(worker: WorkerProcess, *expected: str) -> None:
    """Wait until exactly these speak against being ready; it is alive all the same."""
    eventually(lambda: worker.reasons().keys() == set(expected), 90, worker.describe)
    assert worker.get("/readyz")[0] == (503 if expected else 200)
    assert worker.get("/healthz")[0] == 200


def learned(worker: WorkerProcess, count: int) -> None:
    eventually(lambda: worker.metric("freshet_events_total", outcome="learned") == count, 120, worker.describe)


def test_kafka_and_redis_away_one_after_the_other_and_together_under_load(
    make_worker: MakeWorker,
    breakable_broker: Broker,
    stream: str,
    down: Callable[[], None],
    own_redis: RedisServer,
    own_client: Redis,
) -> None:
    """K9, R6: everything arrives afterwards, exactly once; health stays green, readiness names what is away."""
    values, users, items = clicks(8 * PART)
    servers = breakable_broker.bootstrap_servers

    def send(part: int) -> None:
        send_all(servers, stream, values[part * PART : (part + 1) * PART])

    worker = make_worker(topic=stream, bootstrap_servers=servers, redis_url=own_redis.url, **SETTINGS).start()
    send(0)
    reasons(worker)
    learned(worker, PART)

    own_redis.kill()  # Redis alone: it learns on, and users wait
    send(1)
    learned(worker, 2 * PART)
    reasons(worker, "redis")
    assert worker.metric("freshet_publish_errors_total", kind="connection") > 0
    backlog = eventually(lambda: worker.metric("freshet_publish_backlog", table="users"), 60, worker.describe)
    assert backlog <= 300 + 2 * 300  # one flag a user, and two updates on their way

    send(2)
    down()  # both, with records on their way
    reasons(worker, "kafka", "redis")

    own_redis.start()  # Kafka alone: an empty Redis is filled meanwhile
    reasons(worker, "kafka")
    eventually(lambda: published(own_client, "user"), 60, worker.describe)
    eventually(lambda: worker.metric("freshet_publish_backlog", table="users") == 0, 60, worker.describe)

    breakable_broker.start()
    send(3)
    reasons(worker)
    learned(worker, 4 * PART)

    down()  # Kafka first, then Redis; they come back in the other order
    reasons(worker, "kafka")
    own_redis.kill()
    reasons(worker, "kafka", "redis")
    breakable_broker.start()
    send(4)
    learned(worker, 5 * PART)
    reasons(worker, "redis")
    own_redis.start()
    reasons(worker)

    down()  # the worker is killed while both are away, and starts before either is back
    own_redis.kill()
    worker.kill()
    worker.start()
    reasons(worker, "kafka", "redis", "catching_up")
    breakable_broker.start()
    own_redis.start()
    for part in (5, 6, 7):
        send(part)
    reasons(worker)
    beat = worker.wait_read(8 * PART)
    assert int(beat["events_learned"]) == 8 * PART
    assert int(beat["events_duplicate"]) == 0
    assert_redis_is_the_model(worker, own_client, users, items)


def test_a_stop_while_both_are_away_saves_and_the_next_start_goes_on(
    make_worker: MakeWorker,
    breakable_broker: Broker,
    stream: str,
    down: Callable[[], None],
    own_redis: RedisServer,
    own_client: Redis,
) -> None:
    """K10: SIGTERM during an outage of everything ends with a checkpoint; nothing is read twice afterwards."""
    values, users, items = clicks(3 * PART)
    servers = breakable_broker.bootstrap_servers
    settings = SETTINGS | {"checkpoint__every_events": 10**6, "runtime__grace_s": 120}
    worker = make_worker(topic=stream, bootstrap_servers=servers, redis_url=own_redis.url, **settings).start()
    send_all(servers, stream, values[:PART])
    worker.wait_read(PART)
    own_redis.kill()
    send_all(servers, stream, values[PART : 2 * PART])
    learned(worker, 2 * PART)
    down()
    reasons(worker, "kafka", "redis")
    assert worker.stop() == 0  # within the minute that `stop` waits: not as long as the grace would allow
    header = worker.checkpoints()[0].header
    assert header is not None
    assert [offset for *_, offset in header.positions] == [2 * PART]
    breakable_broker.start()
    own_redis.start()
    worker.start()
    send_all(servers, stream, values[2 * PART :])
    reasons(worker)
    beat = worker.wait_read(3 * PART)
    assert int(beat["events_duplicate"]) == 0
    assert_redis_is_the_model(worker, own_client, users, items)


def test_a_frozen_broker_and_a_frozen_redis_hold_neither_the_loop_nor_the_probes(
    make_worker: MakeWorker,
    breakable_broker: Broker,
    stream: str,
    own_redis: RedisServer,
    own_client: Redis,
) -> None:
    """K3, R3: both keep their connections and answer nothing; the loop turns on."""
    values, users, items = clicks(2 * PART)
    servers = breakable_broker.bootstrap_servers
    settings = SETTINGS | {"http__stale_after_s": 20}
    worker = make_worker(topic=stream, bootstrap_servers=servers, redis_url=own_redis.url, **settings).start()
    send_all(servers, stream, values[:PART])
    worker.wait_read(PART)
    own_redis.pause()
    breakable_broker.pause()
    reasons(worker, "kafka", "redis")
    assert worker.metric("freshet_loop_age_seconds") < 20
    breakable_broker.resume()
    own_redis.resume()
    send_all(servers, stream, values[PART:])
    reasons(worker)
    worker.wait_read(2 * PART)
    assert_redis_is_the_model(worker, own_client, users, items)


def test_a_worker_that_finds_neither_waits_for_both(
    make_worker: MakeWorker, breakable_broker: Broker, stream: str, own_redis: RedisServer
) -> None:
    """K12: nothing answers at the start; it says so, stays up, and is stopped as ever."""
    settings = SETTINGS | {"runtime__grace_s": 120}
    nowhere = f"127.0.0.1:{free_port()}"
    worker = make_worker(
        topic=stream, bootstrap_servers=nowhere, redis_url=f"redis://127.0.0.1:{free_port()}/0", **settings
    ).start()
    reasons(worker, "kafka", "redis", "catching_up")
    assert worker.stop() == 0
    assert worker.logged("stopped")
