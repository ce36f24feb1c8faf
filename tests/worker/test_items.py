"""What the items topic may say, what is kept of it, and what of it is published when."""

import json
from collections.abc import Iterable

import numpy as np
import pytest

from model.features import PER_ITEM, feature_hashes
from tests.consistency import inconsistencies
from tests.offline import NOW_MS, ran, small_settings, state_of
from worker.catalogue import Catalogue
from worker.checkpoint import Saved
from worker.events import Reason, encode
from worker.file_source import FileRecords
from worker.items import Description, ItemDecoder
from worker.offline import offline_worker
from worker.settings import EventSettings, ItemSettings, KafkaSettings, Settings
from worker.source import Partition

ITEMS = Partition("items", 0)


def decode(*values: bytes | None, **settings: int) -> tuple[dict[str, Description | None], list[Reason]]:
    records = FileRecords([(value, NOW_MS) for value in values], ITEMS, 0)
    decoded = ItemDecoder(EventSettings(), ItemSettings(**settings)).decode(records)
    assert len(decoded.changes) + len(decoded.rejected) + decoded.tombstones == len(values)
    return dict(decoded.changes), [rejected.reason for rejected in decoded.rejected]


def test_only_the_id_is_needed_and_the_rest_has_defaults() -> None:
    changes, _ = decode(b'{"item_id": 7}', b'{"item_id": "x", "title": null, "attributes": null, "available": null}')
    assert changes == {"7": Description(), "x": Description()}


def test_attributes_are_kept_as_they_are_in_short_json() -> None:
    changes, _ = decode(
        '{"item_id": "ü", "attributes": {"a" : [1, 2.5, true, null, {"b": "ü\\n"}]}, "x": 1e999}'.encode()
    )
    description = changes["ü"]
    assert description is not None
    assert description.attributes.decode() == '{"a":[1,2.5,true,null,{"b":"ü\\n"}]}'


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", Reason.NOT_JSON),
        (b"null", Reason.NOT_OBJECT),
        (b"[" * 100_000, Reason.NOT_OBJECT),
        (b'{"item_id": "' + b"x" * 257 + b'"}', Reason.BAD_ITEM_ID),
        (b'{"item_id": true}', Reason.BAD_ITEM_ID),
        (b'{"item_id": "\\ud800"}', Reason.NOT_JSON),
        (b'{"item_id": 1, "title": {}, "available": 0}', Reason.BAD_TITLE),
        (b'{"item_id": 1, "attributes": {"a": 1e999}}', Reason.BAD_ATTRIBUTES),
        (b'{"item_id": 1, "attributes": {"a": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}}", Reason.BAD_ATTRIBUTES),
        (b'{"item_id": 1, "available": "true"}', Reason.BAD_AVAILABLE),
        (b'{"item_id": 1, "timestamp": -5}', Reason.BAD_TIMESTAMP),
        (b'{"item_id": 1, "pad": "' + b"x" * 1_000_000 + b'"}', Reason.TOO_LARGE),
    ],
)
def test_what_is_no_description_is_rejected_with_one_reason(value: bytes, reason: Reason) -> None:
    changes, reasons = decode(value, b'{"item_id": "good"}')
    assert reasons == [reason]
    assert list(changes) == ["good"]


def test_sizes_are_limited_by_the_settings() -> None:
    small = {"max_title_bytes": 4, "max_attributes_bytes": 10}
    changes, reasons = decode(
        '{"item_id": 1, "title": "üü", "attributes": {"a": "xx"}}'.encode(),
        '{"item_id": 2, "title": "üüü"}'.encode(),
        b'{"item_id": 3, "attributes": {"a": "xxx"}}',
        **small,
    )
    assert list(changes) == ["1"]
    assert reasons == [Reason.BAD_TITLE, Reason.BAD_ATTRIBUTES]


def test_of_many_descriptions_the_newest_are_kept_and_the_others_counted() -> None:
    catalogue = Catalogue(1000)
    for start in range(0, 100_000, 500):
        changed = catalogue.take(
            (str(n), Description(f"t{n}", available=n % 2 == 0)) for n in range(start, start + 500)
        )
        assert set(map(str, range(start, start + 500))) <= set(changed)
    assert len(catalogue) == 1000
    assert catalogue.evicted == 99_000
    assert catalogue.unavailable == {str(n) for n in range(99_001, 100_000, 2)}
    assert catalogue.get("5") == Description()
    again = Catalogue(10)
    again.load(catalogue.state())
    assert (len(again), again.get("99999")) == (10, Description("t99999", available=False))


def test_only_what_is_different_is_told_and_describing_again_keeps_an_item_longer() -> None:
    catalogue = Catalogue(2)
    assert catalogue.columns(["a"]) == ([], [], [])  # nothing was ever described: nothing is written
    assert catalogue.take([("a", Description("A")), ("b", Description("B"))]) == ["a", "b"]
    assert catalogue.take([("a", Description("A")), ("x", None)]) == []
    assert catalogue.take([("c", Description("C"))]) == ["c", "b"]  # a was described again since
    assert catalogue.take([("a", None), ("a", Description("A", available=False))]) == ["a"]
    assert catalogue.columns(["a", "b", "c"]) == (["A", "", "C"], [b"{}"] * 3, [False, True, True])


def test_features_are_the_attributes_first_then_words_of_the_title_and_bounded() -> None:
    one = feature_hashes("Die Hard 2", {"genres": ["Action", "Thriller"], "year": 1990, "deep": {"er": {"x": "y"}}})
    assert np.count_nonzero(one) == 2 + 2 + 1 + 3
    other = feature_hashes("die HARD", {"genres": ["action"], "year": 1995})
    shared = set(one.tolist()) & set(other.tolist()) - {0}
    assert len(shared) == 4  # the genre, the decade, two words
    assert feature_hashes("a b", {"tags": [str(n) for n in range(1000)]}).shape == (PER_ITEM,)
    assert not feature_hashes("", {}).any()


# ---- through the worker's own parts


def described(*names: str, **said: object) -> list[bytes]:
    return [
        json.dumps({"item_id": name, "title": name, "attributes": {"kind": name[0]}} | said).encode() for name in names
    ]


def items_settings(**model: object) -> Settings:
    """Of a worker whose file is an items topic."""
    return small_settings(**model).model_copy(update={"kafka": KafkaSettings(items_topic="file")})


def test_a_described_item_has_a_row_but_has_not_appeared_and_goes_first() -> None:
    state = ran(items_settings(item_capacity=40), described(*(f"a{n}" for n in range(30))))
    learner = state.learner
    assert len(learner.items) == 30
    rows = learner.items.lookup([f"a{n}" for n in range(30)])
    assert (learner.first_seen[rows] > learner.events).all()
    assert learner.items_live(rows).all()
    clicks = ran(small_settings(item_capacity=40), [encode(f"u{n}", f"c{n}") for n in range(40)], going_on_from=None)
    saved, _ = state.snapshot()
    worker = offline_worker(small_settings(item_capacity=40), [(encode(f"u{n}", f"c{n}"), NOW_MS) for n in range(40)])
    worker.learner.load(saved["learner"])
    worker.run(drain=True)
    # Every clicked item is there: the described ones have made room for them, and none of each other.
    assert all(f"c{n}" in worker.learner.items for n in range(40))
    assert len(clicks.learner.items) == len(worker.learner.items) == 40


def test_more_descriptions_than_rows_evict_no_clicked_item() -> None:
    clicked = ran(small_settings(item_capacity=40), [encode(f"u{n}", f"c{n}") for n in range(35)])
    saved, _ = clicked.snapshot()
    worker = offline_worker(items_settings(item_capacity=40), list(records(described(*(f"a{n}" for n in range(99))))))
    worker.learner.load(saved["learner"])
    worker.run(drain=True)
    assert all(f"c{n}" in worker.learner.items for n in range(35))
    assert len(worker.learner.items) == 40
    assert worker.ingest.counts["described"] == 99


def test_what_cannot_be_had_gets_no_row_and_what_is_withdrawn_loses_it() -> None:
    state = ran(items_settings(), [*described("a1", "a2"), *described("a3", available=False), *described("a1")])
    assert [name in state.learner.items for name in ("a1", "a2", "a3")] == [True, True, False]
    observed = state.learner.withdraw(["a1", "nobody"])
    assert [ids for _, ids in observed.evicted_items] == [["a1"]]
    assert "a1" not in state.learner.items


def test_a_saved_worker_knows_what_was_described_and_places_the_same_vectors() -> None:
    clicks = [encode(f"u{n % 7}", f"{'ab'[n % 2]}{n % 10}") for n in range(200)]
    first = ran(items_settings(), described(*(f"{kind}{n}" for kind in "ab" for n in range(12))))
    saved, header = first.snapshot()
    assert inconsistencies(Saved(__file__, 1, 0, header), saved) == []  # type: ignore[arg-type]
    whole, again = (offline_worker(small_settings(), list(records(clicks))) for _ in range(2))
    whole.learner.load(saved["learner"])
    whole.run(drain=True)
    middle = offline_worker(small_settings(), list(records(clicks[:90])))
    middle.learner.load(saved["learner"])
    middle.run(drain=True)
    again.learner.load(middle.learner.state())
    again.source.seek({Partition("file", 0): 90})
    again.run(drain=True)
    rows = whole.learner.items.lookup(["a11", "b11"])  # unclicked
    assert (whole.learner.items.last_used[rows] < 0).all()
    ours, theirs = (state_of(worker).snapshot()[0]["learner"]["family"]["items"] for worker in (whole, again))
    for name in ours:
        assert (ours[name]["weight"] == theirs[name]["weight"]).all()
    before = saved["learner"]["family"]["items"]["items"]["weight"][rows.tolist()]
    assert (before != ours["items"]["weight"][rows.tolist()]).any()  # they follow what is clicked


def records(values: Iterable[bytes]) -> Iterable[tuple[bytes, int]]:
    return ((value, NOW_MS) for value in values)
