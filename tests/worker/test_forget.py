"""A user is erased in stream order, whatever the polls were, and counted in exactly one outcome."""

import io
import json
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.learner import OnlineLearner
from tests.streams import batch, differences, small_config
from worker.dead_letter import NoDeadLetters
from worker.dedup import DedupWindow
from worker.events import Decoder, encode, encode_forget
from worker.file_source import FileRecords
from worker.ingest import OUTCOMES, Ingest, Taken
from worker.outbox import Outbox
from worker.settings import EventSettings, PublishSettings
from worker.source import Partition
from worker.updates import Ack, Removed, Update, UserVectors

NOW_MS = 1_700_000_000_000


def ingest() -> tuple[Ingest, OnlineLearner]:
    learner = OnlineLearner(small_config(user_capacity=40, item_capacity=33), torch.device("cpu"))
    return Ingest(Decoder(EventSettings()), DedupWindow(50), NoDeadLetters(), learner), learner


def records(values: Sequence[bytes | None]) -> FileRecords:
    return FileRecords([(value, NOW_MS) for value in values], Partition("clicks", 0), 0)


def took(values: Sequence[bytes | None], cuts: Iterable[int]) -> tuple[Ingest, OnlineLearner]:
    """An ingest that took `values` in polls of the sizes `cuts`, over and over."""
    taker, learner = ingest()
    sizes, start = list(cuts), 0
    while start < len(values):
        size = sizes[0]
        list(taker.take(records(values[start : start + size])))
        start, sizes = start + size, [*sizes[1:], size]
    return taker, learner


def stream(count: int, seed: int = 0) -> list[bytes | None]:
    """Clicks of 60 users, one in eight events erases one of them; repetitions, broken records and tombstones."""
    rng = np.random.default_rng(seed)
    values: list[bytes | None] = []
    for n in range(count):
        user, item = f"u{rng.integers(60)}", f"i{rng.integers(50)}"
        kind = rng.random()
        if kind < 0.125:
            values.append(encode_forget(user, event_id=f"f{n - rng.integers(2)}"))
        elif kind < 0.2:
            values.append(
                [None, b"{", encode(user, item, event_type="impression"), values[-1] if values else b"7"][n % 4]
            )
        else:
            values.append(encode(user, item, event_id=f"e{n}"))
    return values


@pytest.mark.parametrize("cuts", [[600], [7, 64, 1], [16], [100, 1, 1]])
def test_the_grouping_of_records_does_not_change_a_bit(cuts: list[int]) -> None:
    one_by_one, together = took(stream(600), [1]), took(stream(600), cuts)
    assert differences(one_by_one[1].state(), together[1].state()) == []
    assert differences(one_by_one[0].state(), together[0].state()) == []
    assert one_by_one[0].counts["forgotten"] > 30


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_however_the_records_come(seed: int, cuts: list[int]) -> None:
    one_by_one, together = took(stream(120, seed), [1]), took(stream(120, seed), cuts)
    assert differences(one_by_one[1].state(), together[1].state()) == []


def test_a_worker_that_was_saved_in_between_ends_in_the_same_state() -> None:
    """What was freed, drawn anew and counted by then is in the checkpoint."""
    whole, first, second = took(stream(600), [50]), took(stream(600)[:337], [50]), ingest()
    file = io.BytesIO()
    torch.save([first[0].state(), first[1].state()], file)
    file.seek(0)
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load(state)
    list(second[0].take(records(stream(600)[337:])))
    assert differences(second[1].state(), whole[1].state()) == []
    assert differences(second[0].state(), whole[0].state()) == []


def test_it_is_the_same_as_forgetting_by_hand() -> None:
    clicks = [(f"u{n % 5}", f"i{n % 9}") for n in range(100)]
    values: list[bytes | None] = [encode(*click) for click in clicks]
    values[50:50] = [encode_forget("u3"), encode_forget("nobody"), encode_forget("u1")]
    _, learner = took(values, [1000])
    by_hand = OnlineLearner(learner.config, torch.device("cpu"))
    by_hand.observe(batch(*map(list, zip(*clicks[:50], strict=True))))
    for user in ("u3", "u1"):
        by_hand.forget(user)
    by_hand.observe(batch(*map(list, zip(*clicks[50:], strict=True))))
    assert differences(by_hand.state(), learner.state()) == []


def test_every_record_ends_in_one_count() -> None:
    values = stream(600)
    taker, _ = took(values, [64])
    assert set(taker.counts) <= set(OUTCOMES)
    assert taker.counts.total() == taker.records == len(values)
    assert all(taker.counts[outcome] for outcome in ("learned", "forgotten", "duplicate", "ignored", "rejected"))


def test_what_comes_after_makes_a_new_user() -> None:
    values: list[bytes | None] = [encode("u", f"i{n}") for n in range(5)]
    _, learner = took([*values, encode_forget("u"), encode("u", "i9")], [100])
    row = learner.users.lookup(["u"])
    assert learner.log.count[row] == [1]
    assert learner.item_ids(learner.log.newest(row, 5)[0]) == ["i9"]


def test_a_repeated_forget_event_does_not_erase_the_new_user() -> None:
    """An at-least-once producer may send it again, after the user has come back."""
    gone = encode_forget("u", event_id="f1")
    taker, learner = took([encode("u", "i1"), gone, encode("u", "i2"), gone, encode("u", "i3")], [100])
    assert learner.log.count[learner.users.lookup(["u"])] == [2]
    assert (taker.counts["forgotten"], taker.counts["duplicate"]) == (1, 1)


def saved_bytes(*states: object) -> bytes:
    file = io.BytesIO()
    torch.save(list(states), file)
    return file.getvalue()


@pytest.mark.parametrize("family", ["two_tower", "mf"])
def test_nothing_of_a_forgotten_user_is_left_in_what_is_saved(family: str) -> None:
    """Neither its id nor what it clicked: its item stands in no log, no replayed and no waiting event."""
    config = small_config(family=family, user_capacity=40, item_capacity=60, seen_items=40, history=20)
    learner = OnlineLearner(config, torch.device("cpu"))
    taker = Ingest(Decoder(EventSettings()), DedupWindow(50), NoDeadLetters(), learner)
    others = [encode(f"u{n % 7}", f"i{n % 20}") for n in range(103)]
    secret = [encode("the-forgotten-one", f"secret-{n % 20}") for n in range(35)]  # its log grew twice
    list(taker.take(records([*others[:50], *secret, *others[50:], *secret[:3]])))
    rows = set(learner.items.lookup([f"secret-{n}" for n in range(20)]).tolist())
    rows -= set(range(0, 100, 8))  # such numbers also link the free blocks of the log
    assert b"the-forgotten-one" in saved_bytes(learner.state(), taker.state())
    list(taker.take(records([encode_forget("the-forgotten-one")])))
    state = learner.state()
    assert b"the-forgotten-one" not in saved_bytes(state, taker.state())
    used = set(state["log"]["arena"].tolist()) | set(state["replay"]["items"].tolist())
    assert not rows & (used | set(state["pending"]["items"].tolist()))


class Redis:
    """Keeps what is handed over and acknowledges it at once, as the publisher does (see `worker.updates.Publishes`)."""

    epoch: int | None = 1
    seen_positions: bytes | None = b""
    connected = True
    superseded_by: int | None = None
    problem: str | None = None

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.told = 0

    def start(self) -> None: ...

    def take_loss(self) -> bool:
        return False

    def ready_for(self, kind: type[Update]) -> bool:
        return True

    def submit(self, update: Update) -> None:
        self.updates.append(update)

    def acknowledged(self) -> list[Ack]:
        new, self.told = self.updates[self.told :], len(self.updates)
        return [Ack(update, NOW_MS) for update in new]

    def sweep(self, version: int = 0) -> None: ...

    def close(self, timeout_s: float) -> bool:
        return True

    def holds(self) -> set[str]:
        """The users whose key there is."""
        users: set[str] = set()
        for update in self.updates:
            if isinstance(update, UserVectors):
                users |= set(update.ids)
            elif isinstance(update, Removed):
                users -= set(update.users)
        return users

    def removed(self) -> list[str]:
        return [user for update in self.updates if isinstance(update, Removed) for user in update.users]


def publish(outbox: Outbox, taken: Iterable[Taken] = ()) -> None:
    for part in taken:
        outbox.mark(part)
    outbox.turn(0.0, NOW_MS, {}, dict, ended=True)


def test_its_key_goes_and_comes_back_with_its_next_click() -> None:
    taker, learner = ingest()
    redis = Redis()
    outbox = Outbox(learner, redis, PublishSettings(background_per_s=0))
    publish(outbox, taker.take(records([encode("u", "i1"), encode("v", "i1")])))
    assert redis.holds() == {"u", "v"}
    publish(outbox, taker.take(records([encode_forget("u")])))
    assert redis.holds() == {"v"}
    publish(outbox)
    assert json.dumps(outbox.state(), default=str).count('"u"') == 0, "once it is acknowledged"
    publish(outbox, taker.take(records([encode("u", "i2"), encode_forget("v"), encode("v", "i2")])))
    assert redis.holds() == {"u", "v"}
    assert [update.recent for update in redis.updates if isinstance(update, UserVectors)][-1] == [b'["i2"]'] * 2
    assert outbox.evicted["users"] == 0, "the table is not full"


def test_a_key_that_an_older_worker_left_goes_too() -> None:
    taker, learner = ingest()
    redis = Redis()
    outbox = Outbox(learner, redis, PublishSettings(background_per_s=0))
    publish(outbox, taker.take(records([encode_forget("of an older life")])))
    assert redis.removed() == ["of an older life"]
    assert learner.users.rows == 1, "no row is given for it"


def test_a_flood_of_users_that_nobody_knows_waits_in_bounded_memory() -> None:
    taker, learner = ingest()

    class Away(Redis):
        def ready_for(self, kind: type[Update]) -> bool:
            return False

    outbox = Outbox(learner, Away(), PublishSettings())
    for start in range(0, 12_000, 2000):
        publish(outbox, taker.take(records([encode_forget(str(n)) for n in range(start, start + 2000)])))
    assert len(outbox.state()["removed_users"]) == 10_000
    assert taker.counts["forgotten"] == 12_000
