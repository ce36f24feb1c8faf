"""The publisher against a real Redis: layout, order, one writer, and every way in which Redis can be away."""

import json
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from pydantic import SecretStr
from redis import Redis

from replay.local_stack import RedisServer, start_redis
from tests.proxy import TcpProxy, Way
from tests.waiting import eventually
from worker.publisher import Heartbeat, ItemVectors, Meta, Popular, Publisher, Removed, UserVectors
from worker.settings import PublishSettings, RedisSettings, SettingsError
from worker.telemetry import Telemetry

pytestmark = pytest.mark.integration

DIM = 3
HEARTBEAT_S, TIMEOUT_S = 0.05, 0.25
AWAY_MS = 1000 * (3 * HEARTBEAT_S + TIMEOUT_S)  # a worker that was silent for longer counts as frozen

Make = Callable[..., Publisher]


@pytest.fixture
def make(redis_url: str) -> Iterator[Make]:
    """Makes publishers, and closes them."""
    made: list[Publisher] = []

    def publisher(
        url: str = redis_url, *, prefix: str = "rec", ttl_s: int = 0, dim: int = DIM, family: str = "two_tower", **rest
    ) -> Publisher:
        redis = RedisSettings(url=SecretStr(url), prefix=prefix, ttl_s=ttl_s, timeout_s=TIMEOUT_S)
        publish = PublishSettings(heartbeat_s=HEARTBEAT_S, max_users=rest.pop("max_users", 2000), stats_length=50)
        meta = Meta(dim, family, exact=True, model="m1", started_ms=7)
        made.append(Publisher(redis, publish, meta, **rest))
        return made[-1]

    yield publisher
    for publisher_ in made:
        publisher_.close(0)


def users(ids: Sequence[str], version: int = 1, value: float = 0.5, positions: bytes = b"") -> UserVectors:
    count = len(ids)
    vectors = np.full((count, DIM), value, np.float32)
    return UserVectors(list(ids), vectors, [b"[]"] * count, np.full(count, 3), version, 99, positions)


def items(ids: Sequence[str], version: int = 1, value: float = 0.25) -> ItemVectors:
    return ItemVectors(list(ids), np.full((len(ids), DIM), value, np.float32), np.full(len(ids), 8), version, 99)


def claimed(publisher: Publisher) -> Publisher:
    """Turned by hand until it has claimed. A publisher that nobody turns is as good as frozen."""
    eventually(lambda: publisher.turn() is not None and publisher.epoch, what="a claim")
    return publisher


def written(publisher: Publisher, *updates) -> list:
    """Hand updates over, turn by hand until all are acknowledged."""
    acks = []
    for update in updates:
        publisher.submit(update)
        eventually(lambda: publisher.turn() is not None and acks.extend(publisher.acknowledged()) is None and acks)
    return acks


def acknowledged(publisher: Publisher, count: int = 1) -> list:
    """Acknowledgements of a publisher whose thread runs."""
    acks: list = []
    eventually(lambda: acks.extend(publisher.acknowledged()) or len(acks) >= count, what=f"{count} acks")
    return acks


def vector(client: Redis, key: str) -> tuple[float, ...]:
    return struct.unpack(f"<{DIM}f", client.hget(key, "vector"))


def server_ms(client: Redis) -> float:
    seconds, micros = client.time()
    return 1000 * seconds + micros / 1000


def away(client: Redis) -> None:
    """Wait until whoever is not turned now counts as frozen."""
    until = server_ms(client) + AWAY_MS + 1
    eventually(lambda: server_ms(client) > until)


# ---- layout


def test_a_bare_client_reads_what_the_layout_says(make: Make, redis_client: Redis) -> None:
    publisher = make()
    publisher.start()
    eventually(lambda: publisher.ready_for(UserVectors))
    vectors = np.array([[1, -2.5, 3], [0, 0.1, 1e-30]], np.float32)
    publisher.submit(UserVectors(["u1", "u2"], vectors, [b'["9","8"]', b"[]"], np.array([5, 6]), 11, 1234, b'{"c":1}'))
    titles, attributes = ["Toy Story (1995)", "Amélie"], [b'{"year":1995}', b"{}"]
    publisher.submit(ItemVectors(["i1", "i2"], vectors, np.array([7, 8]), 12, 1235, titles, attributes, [True, False]))
    publisher.submit(Popular(["i2", "i1"], np.array([9.5, 0.25])))
    publisher.submit(Heartbeat({"recall_at_10": 0.25, "events": 4, "state": "ready"}))
    acknowledged(publisher, 4)

    epoch = str(publisher.epoch).encode()
    assert redis_client.hgetall("rec:user:u1") == {
        b"vector": struct.pack("<3f", 1, -2.5, 3),
        b"recent": b'["9","8"]',
        b"events": b"5",
        b"epoch": epoch,
        b"version": b"11",
        b"updated_ms": b"1234",
    }
    assert redis_client.hgetall("rec:item:i2") == {
        b"vector": vectors[1].astype("<f4").tobytes(),
        b"title": "Amélie".encode(),
        b"attributes": b"{}",
        b"available": b"0",
        b"events": b"8",
        b"epoch": epoch,
        b"version": b"12",
        b"updated_ms": b"1235",
    }
    assert redis_client.zrange("rec:popular", 0, -1, withscores=True) == [(b"i1", 0.25), (b"i2", 9.5)]
    meta = {b"layout": b"1", b"dim": b"3", b"dtype": b"float32le", b"metric": b"dot", b"exact": b"1"}
    meta |= {b"family": b"two_tower", b"model": b"m1", b"started_ms": b"7", b"epoch": epoch}
    assert redis_client.hgetall("rec:meta") == meta
    worker = redis_client.hgetall("rec:worker")
    assert worker[b"positions"] == b'{"c":1}'
    assert worker[b"epoch"] == epoch
    assert (worker[b"recall_at_10"], worker[b"events"], worker[b"state"]) == (b"0.25", b"4", b"ready")
    (_, beat), *more = redis_client.xrange("rec:stats")
    assert not more
    assert beat.items() >= {b"recall_at_10": b"0.25", b"positions": b'{"c":1}', b"epoch": epoch}.items()
    assert beat[b"heartbeat_ms"] == worker[b"heartbeat_ms"]


@pytest.mark.parametrize("name", ["用户", "a b\r\n", "{x}", ":", "*", "x" * 256, "\x00", "🎬"])
def test_an_id_of_any_shape_stands_in_its_key_as_it_is(make: Make, redis_client: Redis, name: str) -> None:
    written(claimed(make()), users([name]))
    assert redis_client.exists(f"rec:user:{name}") == 1


def test_columns_that_are_not_given_are_left_as_they_are(make: Make, redis_client: Redis) -> None:
    publisher = claimed(make())
    titled = ItemVectors(["i"], np.ones((1, DIM), np.float32), np.ones(1, np.int64), 1, 1, ["Heat"])
    written(publisher, titled, items(["i"], version=2, value=2))
    assert redis_client.hget("rec:item:i", "title") == b"Heat"
    assert vector(redis_client, "rec:item:i") == (2, 2, 2)


def test_columns_that_do_not_fit_are_refused_at_once(make: Make) -> None:
    publisher = claimed(make())
    good = users(["a", "b"])
    for wrong in (
        UserVectors(good.ids, good.vectors[:1], good.recent, good.events, 1, 1),
        UserVectors(good.ids, good.vectors[:, :2], good.recent, good.events, 1, 1),
        UserVectors(good.ids, good.vectors, good.recent[:1], good.events, 1, 1),
        UserVectors(good.ids, good.vectors, good.recent, good.events[:1], 1, 1),
        ItemVectors(good.ids, good.vectors, good.events, 1, 1, titles=["one"]),
        Popular(["a"], np.zeros(2)),
        Heartbeat({"positions": "{}"}),
    ):
        with pytest.raises(ValueError, match=r"rows|vectors are|scores|itself"):
            publisher.submit(wrong)
    assert publisher.backlog == 0


def test_vectors_that_are_not_finite_are_skipped_and_counted(make: Make, redis_client: Redis) -> None:
    telemetry = Telemetry()
    publisher = claimed(make(telemetry=telemetry))
    update = users(["good", "nan", "inf", "last"])
    update.vectors[1, 2], update.vectors[2, 0] = np.nan, -np.inf
    (ack,) = written(publisher, update)
    assert (ack.skipped, ack.refused) == (2, 0)
    assert sorted(redis_client.keys("rec:user:*")) == [b"rec:user:good", b"rec:user:last"]
    counted = telemetry.registry.get_sample_value
    assert counted("freshet_nonfinite_vectors_total", {"table": "users"}) == 2
    assert counted("freshet_published_total", {"table": "users"}) == 2


def test_freshness_is_counted_for_every_event_of_an_acknowledged_write(make: Make) -> None:
    telemetry = Telemetry()
    publisher = claimed(make(telemetry=telemetry, now_ms=lambda: 10_000))
    update = users(["u"])
    timed = UserVectors(
        update.ids, update.vectors, update.recent, update.events, 1, 1, b"", np.array([9_990, 9_500, 9_000])
    )
    written(publisher, timed)
    assert telemetry.registry.get_sample_value("freshet_freshness_seconds_count") == 3
    assert telemetry.registry.get_sample_value("freshet_freshness_seconds_sum") == pytest.approx(1.51)


def test_the_list_of_popular_items_is_replaced_whole(make: Make, redis_client: Redis) -> None:
    publisher = claimed(make())
    many = [str(number) for number in range(5000)]
    written(publisher, Popular(many, np.arange(5000.0)), Popular(["a", "b"], np.array([2.0, np.nan])))
    assert redis_client.zrange("rec:popular", 0, -1) == [b"a"]
    written(publisher, Popular(many, np.arange(5000.0)))
    assert redis_client.zcard("rec:popular") == 5000
    written(publisher, Popular([], np.empty(0)))
    assert not redis_client.exists("rec:popular")


def test_a_figure_without_a_value_leaves_the_heartbeat(make: Make, redis_client: Redis) -> None:
    publisher = claimed(make())
    written(publisher, Heartbeat({"loss": 0.5, "lag": 3, "ok": True}), Heartbeat({"loss": float("nan"), "lag": None}))
    worker = redis_client.hgetall("rec:worker")
    assert worker.keys() & {b"loss", b"lag"} == set()
    assert worker[b"ok"] == b"1"


def test_the_stream_of_heartbeats_is_capped(make: Make, redis_client: Redis) -> None:
    publisher = claimed(make())
    written(publisher, *(Heartbeat({"beat": beat}) for beat in range(400)))
    assert redis_client.xlen("rec:stats") < 300  # 50 wanted; Redis drops whole nodes of 100
    assert redis_client.xrevrange("rec:stats", count=1)[0][1][b"beat"] == b"399"


def test_keys_expire_when_told_to_and_no_more_when_a_later_worker_is_not(make: Make, redis_client: Redis) -> None:
    written(claimed(make(ttl_s=1000)), users(["u"]), items(["i"]))
    assert 0 < redis_client.ttl("rec:user:u") <= 1000
    assert 0 < redis_client.ttl("rec:item:i") <= 1000
    written(claimed(make()), users(["u"]), items(["i"]))
    assert redis_client.ttl("rec:user:u") == redis_client.ttl("rec:item:i") == -1


def test_a_large_update_goes_out_in_several_calls_and_is_acknowledged_once(make: Make, redis_client: Redis) -> None:
    publisher = claimed(make(max_users=10))
    ids = [str(number) for number in range(95)]
    publisher.submit(users(ids, positions=b'{"c":7}'))
    publisher.turn()
    assert len(redis_client.keys("rec:user:*")) == 10
    # readers have seen users of this update: a worker that starts now must catch up with all of it
    assert redis_client.hget("rec:worker", "positions") == b'{"c":7}'
    assert publisher.backlog == 85
    (ack,) = eventually(lambda: publisher.turn() is not None and publisher.acknowledged())
    assert ack.update.ids == ids
    assert len(redis_client.keys("rec:user:*")) == 95


def test_items_get_their_turn_however_many_users_wait(make: Make, redis_client: Redis) -> None:
    publisher = claimed(make())
    publisher.submit(users(["a"]))
    publisher.submit(users(["b"]))
    publisher.submit(items(["i"]))
    publisher.turn()
    publisher.turn()
    assert redis_client.exists("rec:user:a", "rec:item:i", "rec:user:b") == 2
    publisher.turn()
    assert redis_client.exists("rec:user:a", "rec:item:i", "rec:user:b") == 3


def test_positions_move_on_without_a_user(make: Make, redis_client: Redis) -> None:
    written(claimed(make()), users([], positions=b'{"c":3}'))
    assert redis_client.hget("rec:worker", "positions") == b'{"c":3}'


# ---- order


def test_the_newest_version_stays_whatever_the_order(make: Make, redis_client: Redis) -> None:
    publisher = claimed(make())
    second, third, first = written(publisher, users(["u"], 2, 2), users(["u"], 3, 3), users(["u"], 1, 1))
    assert vector(redis_client, "rec:user:u") == (3, 3, 3)
    assert (second.refused, third.refused, first.refused) == (0, 0, 1)


def test_the_same_version_again_is_a_resend(make: Make, redis_client: Redis) -> None:
    (_, again) = written(claimed(make()), users(["u"], 2, 2), users(["u"], 2, 2))
    assert again.refused == 0


def test_a_later_worker_may_begin_with_an_earlier_version(make: Make, redis_client: Redis) -> None:
    written(claimed(make()), users(["u"], 900, 1))
    (ack,) = written(claimed(make()), users(["u"], 2, 2))
    assert ack.refused == 0
    assert vector(redis_client, "rec:user:u") == (2, 2, 2)


def test_an_evicted_id_goes_unless_it_was_written_since(make: Make, redis_client: Redis) -> None:
    publisher = claimed(make())
    written(publisher, users(["old", "back"], 5), items(["thing"], 5), users(["back"], 7))
    (ack,) = written(publisher, Removed(["old", "back", "never"], ["thing"], 6))
    assert redis_client.keys("rec:user:*") == [b"rec:user:back"]
    assert not redis_client.exists("rec:item:thing")
    assert ack.refused == 1


def test_an_evicted_id_is_not_brought_back_by_a_write_from_before(make: Make, redis_client: Redis) -> None:
    """The removal is handed over last and has its turn early: it waits for the users before it."""
    publisher = claimed(make(max_users=1))
    publisher.submit(users(["a", "b", "evicted"], 5))
    publisher.submit(Removed(["evicted"], [], 6))
    acks: list = []
    eventually(lambda: publisher.turn() is not None and acks.extend(publisher.acknowledged()) is None and len(acks) > 1)
    assert sorted(redis_client.keys("rec:user:*")) == [b"rec:user:a", b"rec:user:b"]


def test_a_key_of_another_type_is_left_alone_and_holds_nothing_up(make: Make, redis_client: Redis) -> None:
    redis_client.set("rec:user:b", "somebody else's")
    publisher = claimed(make())
    (ack,) = written(publisher, users(["a", "b", "c"]))
    assert ack.refused == 1
    assert redis_client.get("rec:user:b") == b"somebody else's"
    assert redis_client.exists("rec:user:a", "rec:user:c") == 2


# ---- the claim


def test_the_epoch_is_above_redis_the_checkpoint_and_the_clock(make: Make) -> None:
    assert claimed(make(now_ms=lambda: 100)).epoch == 101
    assert claimed(make(now_ms=lambda: 50)).epoch == 102
    assert claimed(make(now_ms=lambda: 50, checkpoint_epoch=500)).epoch == 501
    assert claimed(make(now_ms=lambda: 1_795_000_000_000)).epoch == 1_795_000_000_001


def test_nothing_is_handed_over_before_the_claim(make: Make) -> None:
    publisher = make()
    assert publisher.epoch is None
    assert publisher.seen_positions is None
    assert not publisher.ready_for(UserVectors)
    assert publisher.problem == "not claimed yet"
    with pytest.raises(RuntimeError, match="not ready for UserVectors"):
        publisher.submit(users(["u"]))


def test_a_new_worker_learns_what_readers_have_seen(make: Make, redis_client: Redis) -> None:
    first = claimed(make())
    assert first.seen_positions == b""
    written(first, users(["u"], positions=b'{"clicks:0":42}'), Heartbeat({"figure": 1}))
    second = claimed(make())
    assert second.seen_positions == b'{"clicks:0":42}'
    assert claimed(make()).seen_positions == b'{"clicks:0":42}'  # also when the one before wrote nothing
    assert redis_client.hget("rec:worker", "figure") is None  # the heartbeat of a worker that is gone


def test_other_vectors_under_the_prefix_are_not_mixed(make: Make, redis_client: Redis) -> None:
    written(claimed(make()), users(["u"]))
    before = redis_client.hgetall("rec:meta")
    other = make(dim=9, family="mf")
    other.turn()
    assert other.conflict is not None
    assert "dim is 3 there and 9 here" in other.conflict
    assert "family is two_tower there and mf here" in other.conflict
    assert not other.ready_for(UserVectors)
    assert redis_client.hgetall("rec:meta") == before
    assert claimed(make(dim=9, family="mf", prefix="rec2")).conflict is None
    assert claimed(make(dim=9, family="mf", replace=True)).conflict is None
    assert redis_client.hget("rec:meta", "dim") == b"9"


# ---- one writer


def test_the_newer_worker_publishes_and_the_older_says_who_has_taken_over(make: Make, redis_client: Redis) -> None:
    older = claimed(make())
    written(older, users(["kept", "evicted"], 5, 1))
    newer = claimed(make())
    written(newer, users(["kept"], 1, 2), Removed(["evicted"], [], 1))

    older.submit(users(["kept", "evicted", "never written"], 6, 9))
    older.submit(items(["i"], 6))
    older.submit(Heartbeat({"figure": 1}))
    eventually(lambda: older.turn() is not None and older.superseded_by)
    assert older.superseded_by == newer.epoch
    assert f"a newer worker has taken over (epoch {newer.epoch}, " in older.problem
    assert vector(redis_client, "rec:user:kept") == (2, 2, 2)
    assert redis_client.keys("rec:user:*") == [b"rec:user:kept"]
    assert not redis_client.exists("rec:item:i", "rec:stats")
    assert not older.ready_for(UserVectors)
    older.submit(users(["u"]))  # goes nowhere, and does not raise in the loop's face
    assert written(newer, users(["kept"], 2, 3))


def test_an_idle_worker_notices_that_it_was_superseded(make: Make) -> None:
    older = make()
    older.start()
    eventually(lambda: older.epoch)
    newer = claimed(make())
    assert eventually(lambda: older.superseded_by) == newer.epoch


def test_a_worker_that_slept_through_a_takeover_and_a_flush_stays_out(make: Make, redis_client: Redis) -> None:
    """The older one wakes first: nothing in Redis tells it of the newer one, and still it must not write."""
    older, newer = claimed(make()), claimed(make())
    older.submit(users(["late"], 6, 9))
    away(redis_client)
    newer.turn()  # was not away: looks after its claim once a heartbeat
    redis_client.flushall()
    for _ in range(5):
        older.turn()
    assert older.problem == "Redis has lost this worker's claim; it is being claimed again"
    eventually(lambda: newer.turn() is not None and newer.take_loss())
    assert written(newer, users(["u"], 1, 2))
    assert eventually(lambda: older.turn() is not None and older.superseded_by) == newer.epoch
    assert redis_client.keys("rec:user:*") == [b"rec:user:u"]


def test_of_two_that_were_both_away_the_newer_comes_back(make: Make, redis_client: Redis) -> None:
    older, newer = claimed(make()), claimed(make())
    older.submit(users(["late"], 6, 9))
    away(redis_client)
    redis_client.flushall()
    older.turn()
    older.turn()  # bids first
    newer.turn()
    newer.turn()
    assert eventually(lambda: older.turn() is not None and older.superseded_by) == newer.epoch
    assert eventually(lambda: newer.turn() is not None and newer.take_loss())
    assert int(redis_client.hget("rec:meta", "epoch")) == newer.epoch
    assert not redis_client.exists("rec:claim", "rec:user:late")


def test_a_worker_that_was_away_alone_comes_back_in_the_end(make: Make, redis_client: Redis) -> None:
    publisher = claimed(make())
    away(redis_client)
    redis_client.flushall()
    publisher.submit(users(["u"]))
    publisher.turn()
    publisher.turn()
    assert redis_client.exists("rec:claim")
    assert eventually(lambda: publisher.turn() is not None and publisher.acknowledged())
    assert publisher.take_loss()
    assert int(redis_client.hget("rec:meta", "epoch")) == publisher.epoch


def test_a_bid_that_paused_begins_again(make: Make, redis_client: Redis) -> None:
    """Frozen once more while it waits: the time it did not watch does not count."""
    publisher = claimed(make())
    away(redis_client)
    redis_client.flushall()
    publisher.turn()
    publisher.turn()
    since = int(redis_client.hget("rec:claim", "since_ms"))
    away(redis_client)
    publisher.turn()
    assert int(redis_client.hget("rec:claim", "since_ms")) > since + AWAY_MS
    assert not redis_client.exists("rec:meta")


def test_a_claim_that_a_failover_rolled_back_is_taken_again(make: Make, redis_client: Redis) -> None:
    older = claimed(make())
    snapshot = redis_client.hgetall("rec:meta"), redis_client.hgetall("rec:worker")
    newer = claimed(make())
    for key, fields in zip(("rec:meta", "rec:worker"), snapshot, strict=True):
        redis_client.delete(key)
        redis_client.hset(key, mapping=fields)
    assert written(newer, users(["u"], 1, 2))
    assert newer.take_loss()
    assert int(redis_client.hget("rec:meta", "epoch")) == newer.epoch
    older.submit(users(["late"], 9, 9))
    assert eventually(lambda: older.turn() is not None and older.superseded_by) == newer.epoch
    assert not redis_client.exists("rec:user:late")


def test_a_start_goes_above_whoever_waits_for_a_lost_claim(make: Make, redis_client: Redis) -> None:
    older = claimed(make(now_ms=lambda: 1000))
    away(redis_client)
    redis_client.flushall()
    older.turn()
    older.turn()
    newer = claimed(make(now_ms=lambda: 10))
    assert newer.epoch == older.epoch + 1


CHILD = """
    import sys, time
    import numpy as np
    from pydantic import SecretStr
    from worker.publisher import Meta, Publisher, UserVectors
    from worker.settings import PublishSettings, RedisSettings

    redis = RedisSettings(url=SecretStr(sys.argv[1]), timeout_s=0.25)
    publisher = Publisher(redis, PublishSettings(heartbeat_s=0.05), Meta(3, "two_tower", True, "m1", 7))
    publisher.start()
    version = 0
    while publisher.superseded_by is None:
        publisher.acknowledged()
        if publisher.ready_for(UserVectors):
            version += 1
            ids = ["shared", f"only-{version}"]
            vectors = np.full((2, 3), 7, np.float32)
            publisher.submit(UserVectors(ids, vectors, [], np.ones(2, np.int64), version, 1))
        time.sleep(0.001)
    print("superseded", publisher.superseded_by, flush=True)
"""


def test_a_process_that_was_stopped_wakes_up_and_stays_out(make: Make, redis_client: Redis, redis_url: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), redis_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as child:
        try:
            eventually(lambda: redis_client.exists("rec:user:only-20"), timeout_s=60)
            child.send_signal(signal.SIGSTOP)
            newer = make()
            newer.start()
            eventually(lambda: newer.ready_for(UserVectors))
            away(redis_client)
            redis_client.flushall()
            newer.submit(users(["shared"], 1, 2))
            acknowledged(newer)
            child.send_signal(signal.SIGCONT)
            assert next(line for line in child.stdout if line.startswith("superseded")).split()[1] == str(newer.epoch)
        finally:
            child.kill()
    assert redis_client.keys("rec:user:*") == [b"rec:user:shared"]
    assert vector(redis_client, "rec:user:shared") == (2, 2, 2)


# ---- Redis loses data


def test_a_flush_is_noticed_by_an_idle_worker_and_told_once(make: Make, redis_client: Redis) -> None:
    publisher = make()
    publisher.start()
    eventually(lambda: publisher.ready_for(UserVectors))
    publisher.submit(users(["u"], positions=b'{"c":5}'))
    acknowledged(publisher)
    redis_client.flushall()
    eventually(publisher.take_loss)
    assert not publisher.take_loss()
    assert redis_client.hget("rec:worker", "positions") == b'{"c":5}'
    assert int(redis_client.hget("rec:meta", "epoch")) == publisher.epoch
    publisher.submit(users(["u"]))
    acknowledged(publisher)
    assert redis_client.exists("rec:user:u")


def test_a_redis_that_went_back_in_time_is_noticed(make: Make, tmp_path: Path) -> None:
    """It restarts from an older snapshot that has this worker's claim, but not all that was acknowledged."""
    with start_redis(tmp_path) as server, Redis.from_url(server.url) as client:
        publisher = claimed(make(server.url))
        written(publisher, users(["kept"], 1))
        client.save()
        written(publisher, users(["lost"], 2))
        server.kill()
        server.start()
        assert client.keys("rec:user:*") == [b"rec:user:kept"]
        assert written(publisher, users(["more"], 3))
        assert publisher.take_loss()


def test_a_restart_that_kept_everything_is_no_loss(make: Make, tmp_path: Path) -> None:
    with start_redis(tmp_path) as server, Redis.from_url(server.url) as client:
        publisher = claimed(make(server.url))
        written(publisher, users(["kept"], 1))
        client.save()
        server.kill()
        publisher.submit(users(["more"], 2))
        eventually(lambda: publisher.turn() is not None and not publisher.connected)
        server.start()
        assert eventually(lambda: publisher.turn() is not None and publisher.acknowledged())
        assert not publisher.take_loss()
        assert client.exists("rec:user:kept", "rec:user:more") == 2


def test_a_redis_that_comes_later_and_empty_is_claimed_and_filled(make: Make, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    publisher = make(server.url)
    publisher.start()
    eventually(lambda: publisher.problem and "connection" in publisher.problem)
    assert not publisher.connected
    with server, Redis.from_url(server.url) as client:
        eventually(lambda: publisher.ready_for(UserVectors))
        publisher.submit(users(["u"]))
        acknowledged(publisher)
        server.kill()
        server.start()
        eventually(publisher.take_loss)
        eventually(lambda: publisher.problem is None)
        assert int(client.hget("rec:meta", "epoch")) == publisher.epoch


# ---- Redis is away


@pytest.fixture
def proxied(make: Make, redis_server: RedisServer) -> Iterator[tuple[Publisher, TcpProxy]]:
    """A publisher that has claimed, and the line it talks over."""
    with TcpProxy("127.0.0.1", redis_server.port) as proxy:
        publisher = make(f"redis://127.0.0.1:{proxy.port}/0")
        publisher.start()
        eventually(lambda: publisher.epoch)
        yield publisher, proxy
        publisher.close(0)


@pytest.mark.parametrize(("way", "count"), [("to_server", 30_000), ("from_server", 0)])
def test_a_batch_whose_line_is_cut_is_sent_again(
    proxied: tuple[Publisher, TcpProxy], redis_client: Redis, way: str, count: int
) -> None:
    """Cut in the middle of the request: not one user was written. Cut before the reply: all were."""
    publisher, proxy = proxied
    ids = [str(number) for number in range(2000)]
    proxy.cut_after(way, count)
    publisher.submit(users(ids, 1, 4))
    (ack,) = acknowledged(publisher)
    assert not proxy.cut_pending
    assert ack.refused == 0
    assert len(redis_client.keys("rec:user:*")) == 2000
    assert publisher.take_loss() is False
    assert proxy.accepted >= 2


def test_a_heartbeat_whose_reply_was_lost_is_in_the_stream_once(make: Make, redis_server, redis_client: Redis) -> None:
    with TcpProxy("127.0.0.1", redis_server.port) as proxy:
        publisher = claimed(make(f"redis://127.0.0.1:{proxy.port}/0"))
        proxy.cut_after("from_server", 0)
        publisher.submit(Heartbeat({"beat": 1}))
        publisher.turn()
        assert not publisher.connected
        assert redis_client.xlen("rec:stats") == 1
        # what came in the meantime waits until the lost call is settled
        publisher.submit(users(["u"]))
        assert eventually(lambda: publisher.turn() is not None and publisher.acknowledged())
        assert redis_client.xlen("rec:stats") == 1
        publisher.close(0)


class Tap(TcpProxy):
    """Keeps what goes to the server, so that it can arrive once more: a network may hold a call back for long."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port)
        self.calls: list[bytes] = []

    def _allowed(self, data: bytes, way: Way) -> bytes:
        if way == "to_server":
            self.calls.append(data)
        return super()._allowed(data, way)


def arrives_late(port: int, call: bytes) -> bytes:
    """The reply to a call that arrives on a connection of its own."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(call)
        return connection.recv(1 << 16)


def test_a_write_that_arrives_after_later_ones_changes_nothing(make: Make, redis_server, redis_client: Redis) -> None:
    """It had run into the time limit, was sent again, and others followed; now its first copy arrives."""
    with Tap(redis_server.port) as tap:
        publisher = claimed(make(f"redis://127.0.0.1:{tap.port}/0"))
        written(publisher, users(["warm", "up"]))  # the script is known
        tap.calls.clear()
        written(publisher, users(["u", "removed"], 2, 2, b'{"c":2}'), Popular(["old"], np.ones(1)))
        late = list(tap.calls)
        written(publisher, users(["u"], 3, 3, b'{"c":3}'), Removed(["removed"], [], 4), Popular(["new"], np.ones(1)))
        replies = [arrives_late(redis_server.port, call) for call in late]
        assert all(b"OK" in reply for reply in replies)
        assert len(replies) >= 2
        assert vector(redis_client, "rec:user:u") == (3, 3, 3)
        assert redis_client.hget("rec:worker", "positions") == b'{"c":3}'
        assert not redis_client.exists("rec:user:removed")
        assert redis_client.zrange("rec:popular", 0, -1) == [b"new"]
        assert written(publisher, users(["u"], 5, 5))
        assert not publisher.take_loss()
        publisher.close(0)


def test_a_claim_that_arrives_twice_is_one_claim(make: Make, redis_server, redis_client: Redis) -> None:
    """The worker has gone on under the first one's epoch: it must not be superseded by itself."""
    with Tap(redis_server.port) as tap:
        claimed(make(f"redis://127.0.0.1:{tap.port}/0"))  # the script is known
        tap.calls.clear()
        publisher = claimed(make(f"redis://127.0.0.1:{tap.port}/0"))
        (claim,) = [call for call in tap.calls if b"start" in call]
        written(publisher, users(["u"], positions=b'{"c":1}'))
        assert b"OK" in arrives_late(redis_server.port, claim)
        assert int(redis_client.hget("rec:meta", "epoch")) == publisher.epoch
        assert written(publisher, users(["u"], 2, 2))
        assert publisher.superseded_by is None
        assert not publisher.take_loss()
        assert redis_client.hget("rec:worker", "positions") == b'{"c":1}'


def test_a_server_that_never_answers_holds_nobody_up(proxied: tuple[Publisher, TcpProxy], redis_client: Redis) -> None:
    publisher, proxy = proxied
    proxy.blackhole()
    publisher.submit(users(["a"], 1))
    publisher.submit(users(["b"], 2))
    eventually(lambda: publisher.problem and publisher.problem.startswith("timeout"))
    assert not publisher.ready_for(UserVectors)  # so the loop keeps what comes, and memory stays bounded
    assert publisher.acknowledged() == []
    assert publisher.backlog == 2
    proxy.resume()
    acknowledged(publisher, 2)
    assert redis_client.exists("rec:user:a", "rec:user:b") == 2
    eventually(lambda: publisher.problem is None)


def test_a_slow_line_gets_smaller_calls_until_one_fits(make: Make, redis_client: Redis) -> None:
    """Each piece of at most 64 KB takes a third of the time limit: the whole update in one call never fits."""
    port = redis_client.connection_pool.connection_kwargs["port"]
    with TcpProxy("127.0.0.1", port) as proxy:
        publisher = make(f"redis://127.0.0.1:{proxy.port}/0")
        publisher.start()
        eventually(lambda: publisher.ready_for(UserVectors))
        proxy.delay(TIMEOUT_S / 3)
        update = users([str(number) for number in range(80)])
        long = UserVectors(update.ids, update.vectors, [b"x" * 3000] * 80, update.events, 1, 1)
        publisher.submit(long)
        acknowledged(publisher)
        assert len(redis_client.keys("rec:user:*")) == 80
        publisher.close(0)


def test_a_stop_during_an_outage_says_what_is_left(proxied: tuple[Publisher, TcpProxy]) -> None:
    publisher, proxy = proxied
    proxy.blackhole()
    publisher.submit(users(["a"]))
    assert publisher.close(timeout_s=0.05) is False
    assert publisher.backlog == 1


def test_a_stop_writes_what_was_handed_over(make: Make, redis_client: Redis) -> None:
    publisher = make()
    publisher.start()
    eventually(lambda: publisher.ready_for(UserVectors))
    publisher.submit(users(["a"]))
    publisher.submit(items(["i"]))
    publisher.submit(Popular(["i"], np.ones(1)))
    assert publisher.close(timeout_s=20) is True
    assert len(publisher.acknowledged()) == 3
    assert redis_client.exists("rec:user:a", "rec:item:i", "rec:popular") == 3
    assert not publisher.ready_for(UserVectors)


def test_only_so_much_waits(make: Make) -> None:
    publisher = claimed(make())
    publisher.submit(users(["a"]))
    publisher.submit(users(["b"]))
    assert not publisher.ready_for(UserVectors)
    assert publisher.ready_for(ItemVectors)
    publisher.turn()
    assert not publisher.ready_for(UserVectors)  # until the loop has taken the acknowledgement
    publisher.acknowledged()
    assert publisher.ready_for(UserVectors)
    with pytest.raises(RuntimeError, match="not ready for UserVectors"):
        publisher.submit(users(["c"])) or publisher.submit(users(["d"]))


# ---- Redis says no


def trouble(publisher: Publisher, kind: str, telemetry: Telemetry) -> None:
    """Wait until the publisher names this kind of trouble, and has counted it."""
    eventually(lambda: publisher.problem and publisher.problem.startswith(f"{kind}:"), what=kind)
    assert telemetry.registry.get_sample_value("freshet_publish_errors_total", {"kind": kind}) > 0
    assert not publisher.connected


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[tuple[RedisServer, Redis]]:
    """A Redis to break."""
    with start_redis(tmp_path / "redis") as server, Redis.from_url(server.url) as client:
        yield server, client


def test_a_redis_that_became_a_replica_is_written_when_it_is_a_master_again(
    make: Make, own_redis: tuple[RedisServer, Redis], redis_server: RedisServer, redis_client: Redis
) -> None:
    server, client = own_redis
    telemetry = Telemetry()
    publisher = make(server.url, telemetry=telemetry)
    publisher.start()
    eventually(lambda: publisher.ready_for(UserVectors))
    client.replicaof("127.0.0.1", redis_server.port)
    publisher.submit(users(["u"]))
    trouble(publisher, "readonly", telemetry)
    client.replicaof("NO", "ONE")
    acknowledged(publisher)
    assert client.exists("rec:user:u")
    eventually(lambda: publisher.problem is None)


def test_a_full_redis_is_written_when_there_is_room_again(make: Make, own_redis: tuple[RedisServer, Redis]) -> None:
    server, client = own_redis
    telemetry = Telemetry()
    publisher = make(server.url, telemetry=telemetry)
    publisher.start()
    eventually(lambda: publisher.ready_for(UserVectors))
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")
    publisher.submit(users(["u"]))
    trouble(publisher, "oom", telemetry)
    assert not client.exists("rec:user:u")
    client.config_set("maxmemory", "0")
    acknowledged(publisher)


def test_a_redis_that_cannot_save_is_written_when_it_can_again(make: Make, tmp_path: Path) -> None:
    blocked = tmp_path / "dump.rdb" / "in the way"
    with start_redis(tmp_path, extra_args=["--save", "3600 1"]) as server, Redis.from_url(server.url) as client:
        telemetry = Telemetry()
        publisher = make(server.url, telemetry=telemetry)
        publisher.start()
        eventually(lambda: publisher.ready_for(UserVectors))
        blocked.mkdir(parents=True)  # the snapshot's name is taken by a folder that is not empty
        client.bgsave()
        eventually(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        publisher.submit(users(["u"]))
        trouble(publisher, "misconf", telemetry)
        blocked.rmdir()
        blocked.parent.rmdir()
        client.bgsave()
        acknowledged(publisher)


def test_passwords_and_rights_are_told_apart_and_never_shown(make: Make, own_redis: tuple[RedisServer, Redis]) -> None:
    server, client = own_redis
    client.execute_command("ACL", "SETUSER", "writer", "on", ">s3cret", "~rec:*", "+@all")
    client.execute_command("ACL", "SETUSER", "reader", "on", ">s3cret", "~rec:*", "+@read", "+@connection")
    client.config_set("requirepass", "t0psecret")

    def problem(login: str, kind: str) -> str:
        telemetry = Telemetry()
        publisher = make(server.url.replace("//", f"//{login}"), telemetry=telemetry)
        publisher.start()
        trouble(publisher, kind, telemetry)
        return publisher.problem

    shown = [problem("", "auth"), problem(":wr0ng@", "auth"), problem("reader:s3cret@", "noperm")]
    assert not any(word in line for line in shown for word in ("s3cret", "wr0ng", "t0psecret"))
    for login in ("writer:s3cret@", ":t0psecret@"):
        assert written(claimed(make(server.url.replace("//", f"//{login}"))), users(["u"]))


def test_a_writer_needs_rights_to_its_prefix_only(make: Make, own_redis: tuple[RedisServer, Redis]) -> None:
    server, client = own_redis
    rights = ["~rec:*", "+@hash", "+@sortedset", "+@stream", "+@scripting", "+scan", "+time", "+del", "+unlink"]
    rights += ["+expire", "+persist", "+pexpire"]
    client.execute_command("ACL", "SETUSER", "writer", "on", ">pw", *rights)
    publisher = claimed(make(server.url.replace("//", "//writer:pw@"), ttl_s=100))
    written(
        publisher, users(["u"]), items(["i"]), Popular(["i"], np.ones(1)), Heartbeat({"a": 1}), Removed(["u"], [], 1)
    )
    publisher.sweep()
    eventually(lambda: publisher.turn() is not None and not publisher.sweeping)
    assert publisher.problem is None


def test_a_unix_socket_will_do(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with start_redis(tmp_path / "data", extra_args=["--unixsocket", str(path)]) as server:
        written(claimed(make(f"unix://{path}?db=3")), users(["u"]))
        with Redis(port=server.port, db=3) as client:
            assert client.exists("rec:user:u")


def test_an_option_that_does_not_exist_is_a_wrong_setting(make: Make, redis_url: str) -> None:
    with pytest.raises(SettingsError, match=r"FRESHET_REDIS__URL: .*sokket_timeout"):
        make(f"{redis_url}?sokket_timeout=3")


# ---- sweep


def swept(publisher: Publisher) -> None:
    publisher.sweep()
    eventually(lambda: publisher.turn() is not None and not publisher.sweeping, what="the end of the sweep")


def test_only_what_only_older_epochs_wrote_is_swept(make: Make, redis_client: Redis) -> None:
    many = [f"gone-{number}" for number in range(3000)]
    written(claimed(make()), users(["kept", *many]), items(["kept", "gone"]), Popular(["kept"], np.ones(1)))
    written(claimed(make(prefix="rec2")), users(["other prefix"]))
    redis_client.set("rec:user:foreign", "text")
    redis_client.hset("rec:item:by-hand", "title", "no epoch")
    publisher = claimed(make())
    written(publisher, users(["kept"]), items(["kept"]))
    swept(publisher)
    left = {b"rec:user:kept", b"rec:item:kept", b"rec:user:foreign", b"rec:item:by-hand"}
    left |= {b"rec:meta", b"rec:worker", b"rec:popular"}
    left |= {b"rec2:meta", b"rec2:worker", b"rec2:user:other prefix"}
    assert set(redis_client.keys()) == left


def test_a_prefix_with_wildcards_is_taken_literally(make: Make, redis_client: Redis) -> None:
    written(claimed(make(prefix="r*[a-z]?\\x")), users(["old"]))
    written(claimed(make(prefix="rrbx\\x")), users(["u"]))
    publisher = claimed(make(prefix="r*[a-z]?\\x"))
    swept(publisher)
    assert redis_client.keys("*user*") == [b"rrbx\\x:user:u"]


def test_a_sweep_waits_for_what_was_handed_over_before_it(make: Make, redis_client: Redis) -> None:
    written(claimed(make()), users(["u"]), items(["i"]))
    publisher = claimed(make(max_users=1))
    publisher.submit(users(["a", "b", "u"]))
    publisher.submit(items(["i"], 2, 2))
    publisher.sweep()
    for _ in range(8):
        assert redis_client.exists("rec:user:u", "rec:item:i") == 2
        publisher.turn()
    swept(publisher)
    assert redis_client.exists("rec:user:u", "rec:item:i") == 2


def test_a_worker_that_was_superseded_sweeps_nothing(make: Make, redis_client: Redis) -> None:
    written(claimed(make()), users(["u"]))
    older = claimed(make())
    newer = claimed(make())
    older.sweep()
    eventually(lambda: older.turn() is not None and older.superseded_by)
    assert redis_client.exists("rec:user:u")
    assert newer.superseded_by is None


def test_recent_items_are_json_for_everyone(make: Make, redis_client: Redis) -> None:
    update = users(["u"])
    recent = json.dumps(["ü", "2"], ensure_ascii=False).encode()
    written(claimed(make()), UserVectors(update.ids, update.vectors, [recent], update.events, 1, 1))
    assert json.loads(redis_client.hget("rec:user:u", "recent")) == ["ü", "2"]


def test_what_was_not_written_since_a_version_is_swept_too(make: Make, redis_client: Redis) -> None:
    """After Redis went back in time: what had been removed since then is there again, in this worker's own epoch."""
    publisher = claimed(make())
    written(publisher, users(["back again"], 3), users(["live"], 5), items(["back again"], 4), items(["live"], 6))
    publisher.sweep(5)
    eventually(lambda: publisher.turn() is not None and not publisher.sweeping)
    assert sorted(redis_client.keys("rec:[ui]*")) == [b"rec:item:live", b"rec:user:live"]
