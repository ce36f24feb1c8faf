"""A user is erased by a running worker: from Redis, from the model, from the newest checkpoint's very bytes."""

import os
import subprocess
import sys

import pytest
from redis import Redis

from replay.local_stack import Broker, create_topic
from tests.clicks import MakeWorker, Send, clicks, published
from tests.waiting import eventually
from tests.worker_process import WorkerProcess
from worker.events import encode, encode_forget

pytestmark = pytest.mark.integration
USER = "the-forgotten-one:用户 *"


def forget(worker: WorkerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m worker forget` with the worker's own settings."""
    command = [sys.executable, "-m", "worker", "forget", *arguments]
    return subprocess.run(
        command, env=os.environ | worker.settings, capture_output=True, text=True, timeout=120, check=False
    )


def newest_bytes(worker: WorkerProcess) -> bytes:
    saved = worker.checkpoints()
    assert saved
    return saved[0].path.read_bytes()


def mentions(client: Redis, text: bytes) -> list[bytes]:
    """Keys that hold `text` in their name or anywhere in their value."""
    return [key for key in client.scan_iter(count=1000) if text in key or text in client.dump(key)]


def test_the_command_erases_a_user_everywhere_the_worker_writes(
    make_worker: MakeWorker, send: Send, redis_client: Redis
) -> None:
    values, users, _ = clicks(500)
    send([*values[:250], *(encode(USER, f"i{n}") for n in range(30)), *values[250:]])
    worker = make_worker(checkpoint__every_s=0.2).start().wait_ready()
    worker.wait_read(530)
    eventually(lambda: published(redis_client, "user") == users | {USER: 30})
    eventually(lambda: USER.encode() in newest_bytes(worker))
    done = forget(worker, USER, "nobody")
    assert done.returncode == 0, done.stderr
    assert f"{USER!r}: written to {worker.settings['FRESHET_KAFKA__TOPICS']}/0 at offset 530" in done.stdout
    assert "checkpoints prune --keep 1" in done.stdout
    beat = worker.wait_read(532)
    eventually(lambda: published(redis_client, "user") == dict(users))
    eventually(lambda: not mentions(redis_client, USER.encode()))
    beat = eventually(lambda: worker.heartbeat() if worker.heartbeat()["publish_backlog"] == "0" else None)
    assert (beat["events_forgotten"], beat["events_learned"], beat["users"]) == ("2", "530", str(len(users)))
    eventually(lambda: worker.metric("freshet_events_total", outcome="forgotten") == 2)
    assert worker.metric("freshet_evicted_total") == 0
    eventually(lambda: USER.encode() not in newest_bytes(worker))
    assert b"u1" in newest_bytes(worker), "ids lie in it as they are: the search above could have found it"
    assert worker.stop() == 0
    assert USER not in worker.log_path.read_text()


def test_what_it_clicks_afterwards_makes_a_new_user(make_worker: MakeWorker, send: Send, redis_client: Redis) -> None:
    values, *_ = clicks(200)
    later: list[bytes | None] = [encode(USER, "i7"), encode(USER, "i8")]
    before = [encode(USER, f"i{n}") for n in range(20)]
    send([*values, *before, encode_forget(USER), *later])
    worker = make_worker().start().wait_ready()
    worker.wait_read(223)
    eventually(lambda: redis_client.hmget(f"rec:user:{USER}", "events", "recent") == [b"2", b'["i8","i7"]'])


@pytest.mark.faults
@pytest.mark.slow
def test_a_user_is_still_forgotten_after_a_crash(make_worker: MakeWorker, send: Send, redis_client: Redis) -> None:
    """Killed before the next save, it reads the event again; its key does not come back meanwhile."""
    values, users, _ = clicks(400)
    send([*values, *(encode(USER, f"i{n}") for n in range(20))])
    worker = make_worker(checkpoint__every_events=100_000, checkpoint__every_s=3600).start().wait_ready()
    worker.wait_read(420)
    assert worker.stop() == 0
    assert USER.encode() in newest_bytes(worker)
    worker.start().wait_ready()
    send([encode_forget(USER)])
    worker.wait_read(421)
    eventually(lambda: published(redis_client, "user") == dict(users))
    worker.kill()
    assert USER.encode() in newest_bytes(worker)
    worker.settings["FRESHET_CHECKPOINT__EVERY_S"] = "0.2"
    worker.start().wait_ready()
    worker.wait_read(421)
    eventually(lambda: USER.encode() not in newest_bytes(worker))
    assert published(redis_client, "user") == dict(users)


@pytest.mark.faults
@pytest.mark.slow
def test_a_topic_that_is_not_there_is_told_and_not_made(make_worker: MakeWorker, broker: Broker, topic: str) -> None:
    done = forget(make_worker(), "--topic", f"{topic}-missing", USER)
    assert done.returncode == 2
    assert f"{USER!r}: not written" in done.stdout
    assert create_topic(broker.bootstrap_servers, f"{topic}-missing"), "it was not there until now"


def test_an_id_that_no_worker_would_take_is_told_before_anything_is_sent(make_worker: MakeWorker) -> None:
    done = forget(make_worker(), "x", "y" * 300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: user id '{'y' * 40}' is longer than 256 bytes\n"


def test_the_field_map_of_the_settings_is_heeded(make_worker: MakeWorker, send: Send, redis_client: Redis) -> None:
    fields = '{"user_id": "$.context.uid", "item_id": "$.product[0].id", "event_type": "$.context.kind"}'
    worker = make_worker(events__fields=fields)
    send(
        [b'{"context": {"uid": "a"}, "product": [{"id": "x"}]}', b'{"context": {"uid": "b"}, "product": [{"id": "x"}]}']
    )
    assert forget(worker, "a").returncode == 0
    worker.start().wait_ready()
    beat = worker.wait_read(3)
    assert (beat["events_learned"], beat["events_forgotten"], beat["events_rejected"]) == ("2", "1", "0")
    eventually(lambda: published(redis_client, "user") == {"b": 1})
