"""Each user's best items in Redis: the full score's own list, current, and gone with the user."""

import json
from typing import Any

import pytest
from redis import Redis

from tests.clicks import MakeWorker, Send, clicks, published
from tests.faults.model_in_redis import BATCH, EXACT, assert_redis_is_the_model, saved_learner
from tests.waiting import eventually
from worker.events import encode, encode_forget

pytestmark = pytest.mark.integration
TOP = 7


def top(client: Redis, user: str) -> list[tuple[str, float]]:
    """The published list of a user."""
    found: Any = client.hget(f"rec:top:{user}", "items")
    return [(item, score) for item, score in json.loads(found or "[]")]


def test_the_list_is_that_of_the_saved_model(make_worker: MakeWorker, send: Send, redis_client: Redis) -> None:
    values, users, items = clicks(20 * BATCH)
    send(values)
    worker = make_worker(publish__top=TOP, **EXACT).start().wait_ready()
    assert_redis_is_the_model(worker, redis_client, users, items)
    learner = saved_learner(worker)
    names = sorted(users)
    _, best = learner.refreshed(learner.users.lookup(names), TOP)
    for user, rows, scores in zip(names, best.items, best.scores, strict=True):
        there = top(redis_client, user)
        assert len(there) == TOP
        for (item, score), row, expected in zip(there, rows, scores, strict=True):
            assert abs(score - expected) < 1e-3
            # Two of the same score may change places.
            assert item == learner.items.ids[row] or min(abs(scores - score)) < 1e-3


def test_a_click_takes_the_item_off_the_list_and_a_forgotten_user_has_none(
    make_worker: MakeWorker, send: Send, redis_client: Redis
) -> None:
    values, users, _ = clicks(1000)
    send(values)
    make_worker(publish__top=TOP).start().wait_ready()
    eventually(lambda: published(redis_client, "user") == dict(users))
    first = eventually(lambda: top(redis_client, "u1"))[0][0]
    send([encode("u1", first)])
    eventually(lambda: first not in dict(top(redis_client, "u1")) and len(top(redis_client, "u1")) == TOP)
    send([encode_forget("u1")])
    eventually(lambda: not redis_client.exists("rec:top:u1", "rec:user:u1"))
    assert top(redis_client, "u2")
