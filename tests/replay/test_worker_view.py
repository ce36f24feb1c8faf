"""Reading what a worker publishes, as any client would."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from replay.demo_report import quantile_ms
from replay.worker_view import Buckets, Items, User, Vectors, heartbeat, number, top

EDGES = (0.001, 0.01, 0.1, 1.0, math.inf)


def histogram(values: list[float]) -> Buckets:
    return Buckets(EDGES, tuple(float(sum(value <= edge for value in values)) for edge in EDGES))


@given(values=st.lists(st.floats(0, 0.999), min_size=1, max_size=200), share=st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    exact = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    upper = next(edge for edge in EDGES if exact <= edge)
    lower = max((edge for edge in EDGES if edge < exact), default=0.0)
    found = histogram(values).quantile(share)
    assert found is not None
    assert lower <= found <= upper


def test_a_quantile_is_interpolated_and_beyond_the_last_edge_is_that_edge() -> None:
    assert Buckets((1.0, 2.0, math.inf), (0.0, 10.0, 10.0)).quantile(0.5) == 1.5
    assert Buckets((1.0, 2.0, math.inf), (0.0, 0.0, 10.0)).quantile(0.5) == 2.0
    assert Buckets((1.0, 2.0, math.inf), (0.0, 0.0, 0.0)).quantile(0.5) is None
    assert Buckets((), ()).quantile(0.5) is None


def test_a_stretch_is_the_difference_of_two_looks() -> None:
    early, late = [0.5] * 10, [0.0005] * 30
    assert histogram(early + late).since(histogram(early)) == histogram(late)
    assert histogram(early).since(Buckets((), ())) == histogram(early)


def test_measured_quantiles() -> None:
    values = [number / 1000 for number in range(1, 101)]
    assert quantile_ms(values, 0.5) == 50
    assert quantile_ms(values, 0.99) == 99
    assert quantile_ms(values, 1) == 100
    assert quantile_ms([0.25], 0.5) == 250
    assert quantile_ms([], 0.5) is None


@given(seed=st.integers(0, 1000), n=st.integers(0, 30))
def test_the_top_is_the_highest_dot_products_without_recent_clicks(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((20, 4)).astype(np.float32)
    user = User(rng.standard_normal(4).astype(np.float32), [str(row) for row in rng.integers(0, 20, 5)])
    scores = {
        str(row): float(vector @ user.vector) for row, vector in enumerate(vectors) if str(row) not in user.recent
    }
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:n]
    assert [item for item, _ in top(user, Items([str(row) for row in range(20)], vectors, {}), n)] == best


@pytest.mark.integration
def test_users_and_items_are_read_and_vectors_of_another_length_are_skipped(redis_client: Redis) -> None:
    def store(key: str, vector: list[float], **fields: str) -> None:
        redis_client.hset(key, mapping={"vector": np.array(vector, "<f4").tobytes(), **fields})

    redis_client.hset("p:meta", mapping={"dim": "2"})
    store("p:item:a:b", [1, 2], title="A: B")
    store("p:item:用户", [3, 4], title="")
    store("p:item:other", [1, 2, 3])
    store("p:user:1", [5, 6], recent=json.dumps(["a:b"]))
    store("p:user:2", [5], recent="[]")
    store("q:item:not-ours", [1, 2])
    redis_client.hset("p:item:bare", mapping={"title": "no vector yet"})
    vectors = Vectors(redis_client, "p")
    items = vectors.items()
    assert dict(zip(items.ids, items.vectors.tolist(), strict=True)) == {"a:b": [1, 2], "用户": [3, 4]}
    assert items.titles == {"a:b": "A: B"}
    user = vectors.user("1")
    assert user is not None
    assert (user.vector.tolist(), user.recent) == ([5, 6], ["a:b"])
    assert vectors.user("2") is None
    assert vectors.user("3") is None
    assert (vectors.count("user"), vectors.count("item")) == (2, 4)


@pytest.mark.integration
def test_more_keys_than_are_asked_for_at_once_are_all_read(redis_client: Redis) -> None:
    vector = np.zeros(1, "<f4").tobytes()
    redis_client.hset("p:meta", mapping={"dim": "1"})
    with redis_client.pipeline() as pipeline:
        for item in range(2500):
            pipeline.hset(f"p:item:{item}", mapping={"vector": vector})
        pipeline.execute()
    vectors = Vectors(redis_client, "p")
    assert vectors.count("item") == 2500
    assert sorted(map(int, vectors.items().ids)) == list(range(2500))


@pytest.mark.integration
def test_a_heartbeat_is_text_and_a_missing_figure_is_none(redis_client: Redis) -> None:
    assert heartbeat(redis_client, "p") == {}
    redis_client.hset("p:worker", mapping={"recall_at_10": "0.25", "loss": ""})
    said = heartbeat(redis_client, "p")
    assert number(said, "recall_at_10") == 0.25
    assert number(said, "loss") is None
    assert number(said, "missing") is None
