"""Records that nobody has thought of, against decode and a second reading of the wire contract.

    python -m tests.fuzz_decode [--seconds 60] [--seed N]

Records are mutated out of tests/data/decode_corpus and made up from parts. Decode must not raise; each record must
come out in one place, whatever stands beside it; and it must accept just what the contract allows, with the values that
are written there, as a plain implementation on top of the standard library's JSON says.
"""

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from worker.events import Decoder
from worker.settings import EventSettings

CORPUS = Path(__file__).parent / "data" / "decode_corpus"
NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000
SETTINGS = EventSettings(max_record_bytes=20_000)
PLACES = {"user_id": "$.context.uid", "item_id": "$.items[1].id", "event_type": "$.kind", "timestamp": "$['a.b']"}
DECODERS = [Decoder(SETTINGS), Decoder(SETTINGS.model_copy(update={"fields": PLACES}))]
DEEP = 100  # levels; how many more are read is not part of the contract


# ---- the contract once more


class NoEvent(Exception):
    """The contract does not allow this record."""


class NotSaid(Exception):
    """The contract leaves this record open."""


@dataclass(frozen=True)
class Expected:
    """What an allowed record means."""

    user: str
    item: str | None  # None: it erases its user
    time_ms: int
    value: float | None
    event_id: str | None


def expected(record: bytes) -> Expected:
    """What a record means. Raises NoEvent or NotSaid."""
    fields = _document(record)
    kind = fields.get("event_type")
    kind = "click" if kind is None else kind
    if not isinstance(kind, str) or kind not in {*SETTINGS.types, "forget"}:
        raise NoEvent
    user = _id(fields.get("user_id"))
    item = None if kind == "forget" else _id(fields.get("item_id"))
    event_id = None if fields.get("event_id") is None else _id(fields["event_id"])
    return Expected(user, item, _time_ms(fields.get("timestamp")), _value(fields.get("value")), event_id)


def _document(record: bytes) -> dict[str, Any]:
    if len(record) > SETTINGS.max_record_bytes:
        raise NoEvent
    try:
        text = record.decode()
        document = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_pairs)
    except RecursionError:
        raise NotSaid from None
    except ValueError:  # Unicode errors are such, too
        raise NoEvent from None
    if _depth(document) > DEEP or text.count("[") + text.count("{") > DEEP:
        raise NotSaid
    _check_texts(document)
    if not isinstance(document, _Object):
        raise NoEvent
    return dict(document.pairs)


def _no_constant(name: str) -> None:
    raise ValueError(name)


@dataclass
class _Object:
    pairs: list[tuple[str, Any]]  # repeated names, too


def _pairs(pairs: list[tuple[str, Any]]) -> _Object:
    return _Object(pairs)


def _depth(document: Any) -> int:
    inner = [value for _, value in document.pairs] if isinstance(document, _Object) else document
    return 1 + max(map(_depth, inner), default=0) if isinstance(inner, list) else 0


def _check_texts(document: Any) -> None:
    """Half a surrogate pair is no text, wherever it stands."""
    if isinstance(document, str):
        try:
            document.encode()
        except UnicodeEncodeError:
            raise NoEvent from None
    elif isinstance(document, _Object):
        for name, value in document.pairs:
            _check_texts(name)
            _check_texts(value)
    elif isinstance(document, list):
        for value in document:
            _check_texts(value)


def _id(value: Any) -> str:
    if type(value) not in (str, int):
        raise NoEvent
    text = str(value)
    if not 1 <= len(text.encode()) <= 256:
        raise NoEvent
    return text


def _time_ms(value: Any) -> int:
    if value is None:
        return NOW_MS
    if type(value) is str:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise NoEvent from None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        time_ms = (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000
    elif type(value) in (int, float) and 0 <= value < 10**17:
        time_ms = value * 1000 if value < 10**11 else value if value < 10**14 else value / 1000
    else:
        raise NoEvent
    for limit in (0, 10**14, NOW_MS + DAY_MS):
        if 0 < abs(time_ms - limit) < 1:
            raise NotSaid  # by how it is rounded
    if not 0 <= time_ms < 10**14 or time_ms > NOW_MS + DAY_MS:
        raise NoEvent
    return round(time_ms)


def _value(value: Any) -> float | None:
    if value is None:
        return None
    # Half a step above the greatest 32-bit float is where rounding gives infinity.
    if type(value) not in (int, float) or not abs(value) < 2**128 - 2**103:
        raise NoEvent
    return float(value)


# ---- what must hold


def check(records: list[bytes | None]) -> Counter[str]:
    """AssertionError, which shows the record, for anything that is not as it must be; outcomes, counted."""
    for decoder in DECODERS:
        together = _outcomes(decoder, records)
        alone = [_outcomes(decoder, [record])[0] for record in records]
        assert together == alone, f"neighbours change an outcome: {records!r}"
    plain = _outcomes(DECODERS[0], records)
    for record, outcome in zip(records, plain, strict=True):
        _check_one(record, outcome)
    return Counter(outcome if isinstance(outcome, str) else "accepted" for outcome in plain)


Outcome = str | tuple[Any, ...]  # a reason, "tombstone", or the event


def _outcomes(decoder: Decoder, records: list[bytes | None]) -> list[Outcome]:
    decoded = decoder.decode(records, [NOW_MS] * len(records))
    places: dict[int, Outcome] = {}
    for row, at in enumerate(decoded.records.tolist()):
        assert at not in places, f"twice: {records[at]!r}"
        value = float(decoded.values[row])
        places[at] = (
            decoded.users[row],
            None if decoded.forget[row] else decoded.items[row],
            int(decoded.times_ms[row]),
            None if math.isnan(value) else value,
            decoded.event_ids[row],
        )
    for rejected in decoded.rejected:
        assert rejected.record not in places, f"accepted and rejected: {records[rejected.record]!r}"
        assert 0 < len(rejected.detail) < 200
        places[rejected.record] = str(rejected.reason)
    rest = [n for n in range(len(records)) if n not in places]
    assert [records[n] for n in rest] == [None] * decoded.tombstones, f"nowhere: {rest}"
    return [places.get(n, "tombstone") for n in range(len(records))]


def _check_one(record: bytes | None, outcome: Outcome) -> None:
    if record is None:
        assert outcome == "tombstone"
        return
    try:
        wanted = expected(record)
    except NotSaid:
        return
    except NoEvent:
        assert isinstance(outcome, str), f"accepted although the contract forbids it: {record!r}"
        return
    assert not isinstance(outcome, str), f"rejected ({outcome}) although the contract allows it: {record!r}"
    user, item, time_ms, value, event_id = outcome
    assert (user, item, event_id) == (wanted.user, wanted.item, wanted.event_id), f"read wrongly: {record!r}"
    assert abs(time_ms - wanted.time_ms) <= 1, f"time read wrongly: {record!r}"
    assert (value is None) == (wanted.value is None), f"value read wrongly: {record!r}"
    assert value is None or math.isclose(value, wanted.value or 0, rel_tol=1e-6, abs_tol=1e-37), record


# ---- records

NAMES = ["user_id", "item_id", "event_type", "timestamp", "value", "event_id", "x", "context", ""]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, 1e300, -0.0, 2**63, 2**64, 10**255, 10**256, NOW_MS, NOW_MS // 1000, NOW_MS * 1000,
    NOW_MS + DAY_MS, NOW_MS + DAY_MS + 1, 10**11, 10**14, 10**17, "", "u", "x" * 256, "x" * 257, "é" * 128, "\ud800",
    "\x00", "click", "view", "forget", "impression", "2023-11-14", "2023-11-14T22:13:20+00:00", "0001-01-01", [], {},
    [1], float("nan"), float("inf"), 3.4028235e38, 3.4028236e38, "\u2028", "😀", "{}", {"a": {"b": [None]}},
]  # fmt: skip
TOKENS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"\\ud83d", b"null", b"NaN", b"1e", b"-", b".", b"0",
          b'"user_id":', b'"item_id":"i"', b"\n", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xc3", b"//", b"'"]  # fmt: skip


def made_up(rng: random.Random) -> bytes:
    """A document of parts, most of them nearly right."""
    fields = {"user_id": rng.choice(["u", 7, "用户"]), "item_id": rng.choice(["i", 9])} if rng.random() < 0.8 else {}
    for _ in range(rng.randrange(4)):
        fields[rng.choice(NAMES)] = rng.choice(VALUES)
    names = list(fields)
    rng.shuffle(names)
    return json.dumps({name: fields[name] for name in names}, ensure_ascii=rng.random() < 0.5).encode(errors="replace")


def mutated(rng: random.Random, record: bytes, other: bytes) -> bytes:
    """One small change."""
    at = rng.randrange(len(record) + 1)
    to = min(len(record), at + rng.choice([1, 1, 2, 5, 20]))
    return rng.choice(
        [
            record[:at] + record[to:],
            record[:at] + rng.choice(TOKENS) + record[at:],
            record[:at] + rng.choice(TOKENS) + record[to:],
            record[:at] + bytes([rng.randrange(256)]) + record[to:],
            record[:at] + other[rng.randrange(len(other) + 1) :],
            record[:at] + record[at:to] * rng.choice([2, 3, 50]) + record[to:],
        ]
    )


def corpus() -> dict[str, bytes]:
    """The records of the corpus by file name: what becomes of them, a dot, what they are."""
    return {path.name: path.read_bytes() for path in sorted(CORPUS.iterdir())}


def poll(rng: random.Random, seeds: list[bytes]) -> list[bytes | None]:
    """A few records, as one poll brings them."""
    records: list[bytes | None] = []
    for _ in range(rng.randrange(1, 7)):
        record = made_up(rng) if rng.random() < 0.5 else rng.choice(seeds)
        for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
            record = mutated(rng, record, rng.choice(seeds))
        records.append(None if rng.random() < 0.02 else record)
    return records


def main() -> int:
    """Fuzz for a while; 1 and the record when something is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    rng, seeds, outcomes = random.Random(seed), list(corpus().values()), Counter[str]()
    print(f"seed {seed}", flush=True)
    until = time.monotonic() + options.seconds
    while time.monotonic() < until:
        outcomes += check(poll(rng, seeds))
    print(f"{outcomes.total()} records: " + ", ".join(f"{n} {name}" for name, n in outcomes.most_common()))
    return 0


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    sys.exit(main())
