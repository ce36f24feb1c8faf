"""Records become events exactly as the wire contract says, and nothing that a record holds raises."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.events import ITEM_REASONS, Decoded, Decoder, Reason, encode, encode_forget
from worker.settings import EventSettings, EventTypeSettings

NOW_MS = 1_700_000_000_000
DECODER = Decoder(EventSettings())


def record(**fields: Any) -> bytes:
    return json.dumps({"user_id": "u", "item_id": "i"} | fields).encode()


def decode(*values: bytes | None, decoder: Decoder = DECODER, now_ms: int = NOW_MS) -> Decoded:
    return decoder.decode(values, [now_ms] * len(values))


def reason(value: bytes, decoder: Decoder = DECODER) -> Reason:
    decoded = decode(value, decoder=decoder)
    assert len(decoded) == 0
    [rejected] = decoded.rejected
    return rejected.reason


def rows(decoded: Decoded) -> list[tuple[object, ...]]:
    """Every row as a tuple, NaN as None, so that rows can be compared."""
    values = [None if np.isnan(value) else float(value) for value in decoded.values]
    columns = (decoded.times_ms, decoded.observe, decoded.weights, decoded.records)
    arrays = [column.tolist() for column in columns]
    return list(zip(decoded.users, decoded.items, *arrays, values, decoded.event_ids, strict=True))


# What an event holds.


def test_the_fields_of_an_event_become_one_row_of_each_column():
    decoded = decode(
        b'{"event_id": "e1", "user_id": "196", "item_id": "242", "event_type": "rating",'
        b' "timestamp": 881250949000, "value": 3.0, "unknown": {"a": [1, null]}}'
    )
    assert rows(decoded) == [("196", "242", 881250949000, True, 1.0, 0, 3.0, "e1")]
    dtypes = [c.dtype for c in (decoded.times_ms, decoded.observe, decoded.weights, decoded.values)]
    assert dtypes == [np.int64, np.bool_, np.float32, np.float32]
    assert decoded.records.dtype == np.int32
    assert (decoded.rejected, decoded.tombstones) == ([], 0)


def test_what_is_absent_has_its_default():
    decoded = decode(b'{"user_id": "u", "item_id": "i"}')
    assert rows(decoded) == [("u", "i", NOW_MS, True, 1.0, 0, None, None)]


def test_null_is_as_good_as_absent():
    assert rows(decode(record(event_type=None, timestamp=None, value=None, event_id=None))) == rows(decode(record()))


def test_a_poll_without_records_has_no_rows():
    decoded = decode()
    assert len(decoded) == 0
    assert decoded.times_ms.shape == decoded.records.shape == decoded.values.shape == (0,)


def test_rows_are_in_the_order_of_the_records_and_name_them():
    decoded = decode(record(user_id="a"), None, b"{", record(user_id="b"), record(user_id=1.5), record(user_id="c"))
    assert decoded.users == ["a", "b", "c"]
    assert decoded.records.tolist() == [0, 3, 5]
    assert [(r.record, r.reason) for r in decoded.rejected] == [(2, Reason.NOT_JSON), (4, Reason.BAD_USER_ID)]
    assert decoded.tombstones == 1


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (196, "196"),
        ("196", "196"),
        (0, "0"),
        (-1, "-1"),
        (2**63, str(2**63)),
        (-(2**200), str(-(2**200))),
        (10**255, str(10**255)),
        ("x" * 256, "x" * 256),
        ("用户", "用户"),
        ("é" * 128, "é" * 128),
        ("\x00", "\x00"),
        ("a\nb", "a\nb"),
        (" ", " "),
        ("\U0001f600", "\U0001f600"),
    ],
)
def test_ids_are_strings_or_integers_of_any_unicode(wire: object, text: str):
    decoded = decode(record(user_id=wire, item_id=wire, event_id=wire))
    assert (decoded.users, decoded.items, decoded.event_ids) == ([text], [text], [text])


@pytest.mark.parametrize(
    "wire", ["", "x" * 257, "é" * 129, 10**256, -(10**255), 1.5, 196.0, True, False, [], {}, ["a"], "\ud800", "a\udc00"]
)
def test_anything_else_is_no_id(wire: object):
    assert reason(record(user_id=wire)) == Reason.BAD_USER_ID
    assert reason(record(item_id=wire)) == Reason.BAD_ITEM_ID
    assert reason(record(event_id=wire)) == Reason.BAD_EVENT_ID


def test_an_event_needs_a_user_and_an_item():
    assert reason(b'{"item_id": "i"}') == Reason.BAD_USER_ID
    assert reason(b'{"user_id": "u"}') == Reason.BAD_ITEM_ID
    assert reason(b'{"user_id": null, "item_id": "i"}') == Reason.BAD_USER_ID
    assert reason(b"{}") == Reason.BAD_USER_ID


@pytest.mark.parametrize(
    ("wire", "times_ms"),
    [
        (881250949, 881250949000),
        (881250949.5, 881250949500),
        (881250949.1236, 881250949124),
        (0, 0),
        (0.001, 1),
        (99_999_999_999, 99_999_999_999_000),
        (100_000_000_000, 100_000_000_000),
        (881250949000, 881250949000),
        (881250949000.4, 881250949000),
        (881250949000499, 881250949000),
        (881250949000500, 881250949001),
        (881250949000500.0, 881250949001),
        (8.81250949e11, 881250949000),
        ("1997-12-04T15:55:49Z", 881250949000),
        ("1997-12-04T15:55:49.5Z", 881250949500),
        ("1997-12-04T15:55:49.1236+00:00", 881250949124),
        ("1997-12-04T16:55:49+01:00", 881250949000),
        ("1997-12-04T15:55:49", 881250949000),
        ("1997-12-04 15:55:49", 881250949000),
        ("1997-12-04", 881193600000),
        ("1970-01-01", 0),
    ],
)
def test_timestamps_are_read_by_magnitude_or_as_iso(wire: object, times_ms: int):
    assert decode(record(timestamp=wire), now_ms=10**14 - 1).times_ms.tolist() == [times_ms]


@pytest.mark.parametrize(
    "wire",
    [
        -1,
        -0.5,
        10**17,
        1e17,
        10**30,
        10**400,
        "1969-12-31T23:59:59Z",
        "",
        "now",
        "881250949",
        "1997-13-01",
        True,
        [],
        {},
    ],
)
def test_anything_else_is_no_timestamp(wire: object):
    assert reason(record(timestamp=wire)) == Reason.BAD_TIMESTAMP


def test_a_timestamp_may_be_a_day_after_its_record_and_no_more():
    day_ms = 86_400_000
    assert len(decode(record(timestamp=NOW_MS + day_ms))) == 1
    assert reason(record(timestamp=NOW_MS + day_ms + 1)) == Reason.FUTURE_TIMESTAMP
    assert len(decode(record(timestamp="1990-01-01"))) == 1


def test_a_record_without_a_time_cannot_lend_one_or_bound_one():
    assert len(decode(record(timestamp=NOW_MS), now_ms=-1)) == 1
    assert [r.reason for r in decode(record(), now_ms=-1).rejected] == [Reason.BAD_TIMESTAMP]
    assert [r.reason for r in decode(record(), now_ms=2**63 - 1).rejected] == [Reason.BAD_TIMESTAMP]


@pytest.mark.parametrize("wire", [3, 3.5, 0, -2.25, 3.4028234663852886e38, -3.4028234663852886e38])
def test_a_value_is_a_finite_number(wire: float):
    assert decode(record(value=wire)).values.tolist() == [wire]


@pytest.mark.parametrize("wire", [3.4028235677973366e38, 1e308, -1e308, 10**400, "3", True, [3], {"a": 3}])
def test_anything_else_is_no_value(wire: object):
    assert reason(record(value=wire)) == Reason.BAD_VALUE


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000])
def test_a_value_that_is_not_finite_is_named_as_the_reason(text: str):
    assert reason(f'{{"user_id": "u", "item_id": "i", "value": {text}}}'.encode()) == Reason.BAD_VALUE


def test_a_value_never_becomes_infinite_beside_one_that_is_absent():
    decoded = decode(record(), record(value=1e308), record(value=2))
    assert decoded.records.tolist() == [0, 2]
    assert np.isnan(decoded.values[0])
    assert decoded.values[1] == 2


def test_an_event_type_does_what_the_settings_say():
    types = {
        "click": EventTypeSettings(),
        "skip": EventTypeSettings(observe=False, weight=-0.5),
        "play": EventTypeSettings(weight=2.0),
    }
    decoder = Decoder(EventSettings(types=types))
    decoded = decode(record(event_type="skip"), record(), record(event_type="play"), decoder=decoder)
    assert decoded.observe.tolist() == [False, True, True]
    assert decoded.weights.tolist() == [-0.5, 1.0, 2.0]


@pytest.mark.parametrize("wire", ["", "Click", "unknown", "x" * 10_000, 1, 1.5, True, ["click"], {"click": 1}])
def test_anything_else_is_no_event_type(wire: object):
    assert reason(record(event_type=wire)) == Reason.BAD_EVENT_TYPE


def test_without_a_click_type_every_event_has_to_name_its_own():
    decoder = Decoder(EventSettings(types={"play": EventTypeSettings()}))
    assert reason(record(), decoder) == Reason.BAD_EVENT_TYPE
    assert len(decode(record(event_type="play"), decoder=decoder)) == 1


# What erases a user.


@pytest.mark.parametrize("item", [None, "i", "", True, 1.5, "x" * 300, {"a": 1}])
def test_a_forget_event_needs_a_user_and_nothing_else(item: object):
    decoded = decode(record(), record(user_id="gone", item_id=item, event_type="forget"), record())
    assert decoded.rejected == []
    assert decoded.forget.tolist() == [False, True, False]
    assert decoded.users[1] == "gone"
    assert not decoded.observe[1]
    assert decoded.weights[1] == 0


def test_a_forget_event_without_a_user_is_rejected():
    assert reason(b'{"event_type": "forget"}') == Reason.BAD_USER_ID
    assert reason(b'{"user_id": true, "item_id": true, "event_type": "forget"}') == Reason.BAD_USER_ID


def test_an_item_that_is_wrong_is_no_better_beside_a_forget_event():
    decoded = decode(record(event_type="forget"), record(item_id=None), record(item_id=1.5))
    assert [(r.record, r.reason) for r in decoded.rejected] == [(1, Reason.BAD_ITEM_ID), (2, Reason.BAD_ITEM_ID)]


def test_forget_cannot_be_given_another_meaning():
    with pytest.raises(ValueError, match="'forget' erases a user"):
        EventSettings(types={"click": EventTypeSettings(), "forget": EventTypeSettings()})
    decoder = Decoder(EventSettings(types={}))
    assert decode(record(event_type="forget"), decoder=decoder).forget.tolist() == [True]
    assert reason(record(), decoder) == Reason.BAD_EVENT_TYPE


PLACES = [
    {},
    {"user_id": "$.context.uid", "event_type": "$.context.kind", "event_id": "$.id"},
    {"user_id": "$.products[2].uid", "event_type": "$.products[0]['a.b']"},
    {"user_id": "$.a[1][0]", "event_type": "$.a[1][1]", "event_id": "$.a[0]"},
]


@pytest.mark.parametrize("fields", PLACES)
def test_a_forget_event_is_written_where_the_settings_look_for_it(fields: dict[str, str]):
    decoder = Decoder(EventSettings(fields=fields))
    decoded = decode(encode_forget("用户", event_id="e1", fields=fields), decoder=decoder)
    assert (decoded.users, decoded.event_ids, decoded.forget.tolist()) == (["用户"], ["e1"], [True])


@pytest.mark.parametrize(
    "fields",
    [
        {"user_id": "$.a", "event_type": "$.a.b"},
        {"user_id": "$.a.b", "event_type": "$.a[0]"},
        {"user_id": "$.a[999999999]"},
        {"user_id": "$.a", "event_type": "$.a"},
    ],
)
def test_places_that_exclude_each_other_are_told(fields: dict[str, str]):
    with pytest.raises(ValueError, match=r"events\.fields"):
        encode_forget("u", fields=fields)


# What a record holds.


def test_the_first_reason_counts():
    assert reason(record(user_id=True, timestamp=-1, value="x")) == Reason.BAD_USER_ID
    assert reason(record(timestamp="2999-01-01", value="x")) == Reason.FUTURE_TIMESTAMP


def test_every_reason_can_happen():
    values = {
        Reason.TOO_LARGE: record(padding="x" * 1_000_000),
        Reason.NOT_UTF8: b'{"user_id": "u", "item_id": "i", "x": "\xff"}',
        Reason.NOT_JSON: b"{",
        Reason.NOT_OBJECT: b"[]",
        Reason.BAD_USER_ID: record(user_id=""),
        Reason.BAD_ITEM_ID: record(item_id=""),
        Reason.BAD_EVENT_TYPE: record(event_type=""),
        Reason.BAD_TIMESTAMP: record(timestamp=""),
        Reason.FUTURE_TIMESTAMP: record(timestamp="2999-01-01"),
        Reason.BAD_VALUE: record(value=""),
        Reason.BAD_EVENT_ID: record(event_id=""),
    }
    assert set(values) == set(Reason) - set(ITEM_REASONS)
    decoded = decode(*values.values())
    assert [rejected.reason for rejected in decoded.rejected] == list(values)
    assert all(0 < len(rejected.detail) < 200 for rejected in decoded.rejected)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b" ",
        b"{",
        b'{"user_id": "u", "item_id": "i"',
        b'{"user_id": "u", "item_id": "i"}}',
        b'{"user_id": "u", "item_id": "i"}{"user_id": "u", "item_id": "i"}',
        b'{"user_id": "u", "item_id": "i"},{"user_id": "u", "item_id": "i"}',
        b'\xef\xbb\xbf{"user_id": "u", "item_id": "i"}',
        b'{"user_id": "u", "item_id": "i", "x": 01}',
        b'{"user_id": "u", "item_id": "i", "x": NaN}',
        b'{"user_id": "u", "item_id": "i", "x": "\\ud800"}',
        b"{'user_id': 'u', 'item_id': 'i'}",
        b'{"user_id": "u\nv", "item_id": "i"}',
        b'{"user_id": "u", "item_id": "i", "x": ' + b"[" * 100_000,
        b'{"user_id": "u", "item_id": "i", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\x00",
        '{"user_id": "u", "item_id": "i"}'.encode("utf-16-be"),
    ],
)
def test_what_is_not_one_json_object_is_rejected(value: bytes):
    assert reason(value) in (Reason.NOT_JSON, Reason.NOT_UTF8)


@pytest.mark.parametrize("value", [b"[]", b"1", b"null", b"true", b'"u"', b"1.5", b"[" * 100_000])
def test_another_json_value_is_no_object(value: bytes):
    assert reason(value) == Reason.NOT_OBJECT


@pytest.mark.parametrize(
    "value",
    [
        b' \r\n\t{"user_id": "u", "item_id": "i"} \r\n\t',
        b'{\n  "user_id": "u",\n  "item_id": "i"\n}\n',
        b'{"user_id": 1, "user_id": "u", "item_id": true, "item_id": "i"}',
        b'{"user\\u005fid": "u", "item_id": "\\u0069"}',
        b'{"user_id": "u", "item_id": "i", "x": 1e999}',
        b'{"user_id": "u", "item_id": "i", "x": ' + b"9" * 5000 + b"}",
        b'{"user_id": "u", "item_id": "i", "": "", "x": {"user_id": "v"}}',
        b'{"user_id": "u", "item_id": "i", "x": ' + b"[" * 200 + b"]" * 200 + b"}",
    ],
)
def test_whatever_json_allows_around_the_fields_is_taken(value: bytes):
    assert rows(decode(value)) == rows(decode(record()))


def test_a_record_may_be_as_long_as_the_settings_say_and_no_longer():
    decoder = Decoder(EventSettings(max_record_bytes=256))
    longest = record(x="").replace(b'"x": ""', b'"x": "' + b"." * (256 - len(record(x=""))) + b'"')
    assert len(longest) == 256
    assert len(decode(longest, decoder=decoder)) == 1
    assert reason(longest + b" ", decoder) == Reason.TOO_LARGE


@pytest.mark.parametrize(
    "values",
    [
        (b'{"user_id":"a","item_id":"b"},{"user_id":"c"', b'"item_id":"d"}'),
        (b'{"user_id":"a","item_id":"b"}{"user_id":"c"', b',"item_id":"d"}'),
        (b'{"user_id":"a","item_id":"b"},{"x":[{}', b'{}],"user_id":"c","item_id":"d"}'),
        (b'{"user_id":"a"', b'"item_id":"b"},{"user_id":"c","item_id":"d"}'),
        (b'{"user_id":"a","item_id":"b"}\n{"user_id":"c","item_id":"d"}', b""),
        (b'{"user_id":"a","item_id":"b"}],[{"user_id":"c"', b'"item_id":"d"}'),
        (b'{"user_id":"\xe7\x94', b'\xa8","item_id":"b"}'),
    ],
)
def test_torn_records_cannot_borrow_from_their_neighbours(values: tuple[bytes, bytes]):
    decoded = decode(record(user_id="first"), *values, record(user_id="last"))
    assert decoded.users == ["first", "last"]
    assert decoded.records.tolist() == [0, 3]
    assert [rejected.record for rejected in decoded.rejected] == [1, 2]


# Other places for the fields.


def test_a_field_map_names_other_places():
    fields = {
        "user_id": "$.context.uid",
        "item_id": "$.products[1].id",
        "timestamp": "$.ts",
        "value": "$['a.b'].c",
        "event_type": "$.context.kind",
    }
    decoder = Decoder(EventSettings(fields=fields))
    document = {
        "context": {"uid": 196, "kind": "view"},
        "products": [{"id": "no"}, {"id": "242"}],
        "ts": "1997-12-04",
        "a.b": {"c": 2.5},
        "user_id": "not this one",
        "event_id": "e",
    }
    decoded = decode(json.dumps(document).encode(), decoder=decoder)
    assert rows(decoded) == [("196", "242", 881193600000, True, 1.0, 0, 2.5, "e")]


@pytest.mark.parametrize("value", [b"{}", b'{"a": 1}', b'{"a": []}', b'{"a": {"b": {}}}', b'{"a": {"b": []}}'])
def test_a_place_that_is_not_there_is_absent(value: bytes):
    decoder = Decoder(EventSettings(fields={"user_id": "$.a.b[0]"}))
    assert reason(value, decoder) == Reason.BAD_USER_ID


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"user": "$.a"}, "unknown field 'user'"),
        ({"user_id": "a"}, "user_id: 'a' is no path"),
        ({"user_id": "$"}, "is no path"),
        ({"user_id": "$."}, "is no path"),
        ({"user_id": "$.a..b"}, "is no path"),
        ({"user_id": "$.a[-1]"}, "is no path"),
        ({"user_id": "$.a[*]"}, "is no path"),
        ({"user_id": "$.a "}, "is no path"),
        ({"user_id": "$[0].a"}, "begins with an index"),
    ],
)
def test_a_wrong_field_map_says_where(fields: dict[str, str], message: str):
    with pytest.raises(ValueError, match=r"events\.fields: ") as error:
        Decoder(EventSettings(fields=fields))
    assert message in str(error.value)


# Whatever comes.

FUZZ = settings(max_examples=150, deadline=None, derandomize=True)

junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(10**10, 10**18),
    st.sampled_from([2**63, 2**64, -(2**63), 10**255, 10**256, 10**400]),
    st.floats(),
    st.floats(0, 1e18),
    st.text(max_size=4),
    st.text(min_size=60, max_size=300),
    st.datetimes().map(lambda time: time.isoformat()),
    st.sampled_from(["click", "view", "impression", "forget", "\ud800", ""]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
ids = st.one_of(st.text(min_size=1, max_size=64), st.integers())
plain = st.fixed_dictionaries({"user_id": ids, "item_id": ids}, optional={"value": st.floats(-1e6, 1e6)})
wild = st.dictionaries(
    st.sampled_from(["user_id", "item_id", "event_type", "timestamp", "value", "event_id", "x"]), junk
)
documents = st.one_of(plain, wild, st.builds(lambda good, bad: good | dict([*bad.items()][:1]), plain, wild))
texts = documents.map(lambda document: json.dumps(document).encode())
cuts = st.builds(lambda text, start, stop: text[start : start + stop], texts, st.integers(0, 5), st.integers(0, 200))
flips = st.builds(
    lambda text, at, byte: text[: at % len(text)] + bytes([byte]) + text[at % len(text) + 1 :],
    texts,
    st.integers(0),
    st.integers(0, 255),
)
fragments = st.lists(
    st.sampled_from([b"{", b"}", b"[", b"]", b",", b":", b"\n", b'"user_id":"a"', b'"item_id":"b"', b'"x"', b"1"])
).map(b"".join)
polls = st.lists(st.one_of(texts, cuts, flips, fragments, st.binary(max_size=20), st.none()), max_size=8)
times = st.sampled_from([NOW_MS, 0, -1, 881250949000, 2**63 - 1])


@given(polls, times)
@FUZZ
def test_every_record_has_one_outcome_that_does_not_depend_on_its_neighbours(poll: list[bytes | None], now_ms: int):
    together = decode(*poll, now_ms=now_ms)
    assert len(together) + len(together.rejected) + together.tombstones == len(poll)
    alone = [decode(value, now_ms=now_ms) for value in poll]
    rows_alone = [(*row[:5], record, *row[6:]) for record, one in enumerate(alone) for row in rows(one)]
    assert rows(together) == rows_alone
    assert together.forget.tolist() == [flag for one in alone for flag in one.forget.tolist()]
    assert together.rejected == [r._replace(record=n) for n, one in enumerate(alone) for r in one.rejected]
    assert np.isfinite(together.values[~np.isnan(together.values)]).all()


@given(st.lists(st.binary()))
@FUZZ
def test_arbitrary_bytes_never_raise(poll: list[bytes]):
    decoded = decode(*poll)
    assert len(decoded) + len(decoded.rejected) == len(poll)


@given(st.lists(documents, max_size=4))
@FUZZ
def test_the_outcome_does_not_depend_on_where_the_fields_are(documents: list[dict[str, object]]):
    names = ("user_id", "item_id", "event_type", "timestamp", "value", "event_id")
    nested = Decoder(EventSettings(fields={name: f"$.a[1].b.{name}" for name in names}))
    plain = decode(*(json.dumps(document).encode() for document in documents))
    deep = decode(*(json.dumps({"a": [0, {"b": d}]}).encode() for d in documents), decoder=nested)
    assert rows(deep) == rows(plain)
    assert [r[:2] for r in deep.rejected] == [r[:2] for r in plain.rejected]


@given(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=64),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=64),
    st.none() | st.integers(0, NOW_MS),
    st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.none() | st.text(st.characters(codec="utf-8"), min_size=1, max_size=64),
)
@FUZZ
def test_what_is_encoded_is_decoded(
    user_id: str, item_id: str, timestamp_ms: int | None, value: float | None, event_id: str | None
):
    text = encode(user_id, item_id, timestamp_ms=timestamp_ms, value=value, event_id=event_id)
    time_ms = NOW_MS if timestamp_ms is None else timestamp_ms
    assert rows(decode(text)) == [(user_id, item_id, time_ms, True, 1.0, 0, value, event_id)]


@pytest.mark.parametrize(
    "fields",
    [
        {"user_id": ""},
        {"user_id": "x" * 257},
        {"item_id": "\ud800"},
        {"event_id": ""},
        {"value": float("nan")},
        {"value": float("inf")},
        {"value": 1e308},
        {"timestamp_ms": -1},
        {"timestamp_ms": 10**14},
    ],
)
def test_what_no_worker_would_take_is_not_encoded(fields: dict[str, Any]):
    with pytest.raises(ValueError, match=r"must be|surrogates"):
        encode(**{"user_id": "u", "item_id": "i"} | fields)
