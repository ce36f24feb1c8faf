"""The wire contract: what a record's value may hold, and how it becomes events.

A value is one JSON object (RFC 8259, UTF-8). What the grammar leaves open: of a repeated name the last one
counts, `null` is as good as absent, and nesting is limited (to some hundred levels). Times before 1970 are
rejected: no click is that old, and a negative number is what many producers write for "unknown".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from worker import event_columns as columns
from worker.field_map import FieldMap

if TYPE_CHECKING:
    from worker.settings import EventSettings

T = TypeVar("T")

FORGET = "forget"  # the event type that erases its user; the settings cannot give it another meaning
_NO_ITEM = "-"  # in place of the item of such an event, which needs none

_Index = npt.NDArray[np.int32]
_Times = npt.NDArray[np.int64]


class Reason(StrEnum):
    """Why a record was rejected: the closed list. Of several reasons the first in this order is given."""

    TOO_LARGE = "too_large"
    NOT_UTF8 = "not_utf8"
    NOT_JSON = "not_json"
    NOT_OBJECT = "not_object"
    BAD_USER_ID = "bad_user_id"
    BAD_ITEM_ID = "bad_item_id"
    BAD_EVENT_TYPE = "bad_event_type"
    BAD_TIMESTAMP = "bad_timestamp"
    FUTURE_TIMESTAMP = "future_timestamp"
    BAD_VALUE = "bad_value"
    BAD_EVENT_ID = "bad_event_id"
    # of the items topic alone
    BAD_TITLE = "bad_title"
    BAD_ATTRIBUTES = "bad_attributes"
    BAD_AVAILABLE = "bad_available"


ITEM_REASONS = (Reason.BAD_TITLE, Reason.BAD_ATTRIBUTES, Reason.BAD_AVAILABLE)  # of no event


class Rejected(NamedTuple):
    """A record that is no event: its index in the poll, and why. `detail` is short and for people."""

    record: int
    reason: Reason
    detail: str


class _Problem(NamedTuple):
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Decoded:
    """The events of one poll in columns, in the order of the records; n rows.

    Each record of the poll is in exactly one place: among the rows, in `rejected`, or in `tombstones`.
    """

    users: list[str]
    items: list[str]
    times_ms: npt.NDArray[np.int64]  # (n,) since the epoch, UTC
    observe: npt.NDArray[np.bool_]  # (n,) enters histories and counts as seen
    weights: npt.NDArray[np.float32]  # (n,) of the gradient
    forget: npt.NDArray[np.bool_]  # (n,) erases its user, and nothing else; its item means nothing
    values: npt.NDArray[np.float32]  # (n,) NaN = absent
    event_ids: list[str | None]
    records: npt.NDArray[np.int32]  # (n,) index of the row's record; repeats where a record has several events
    rejected: list[Rejected]  # in the order of the records
    tombstones: int

    def __len__(self) -> int:
        return len(self.users)


class _WireEvent(msgspec.Struct, omit_defaults=True):
    event_id: str | None = None
    user_id: str = ""
    item_id: str = ""
    event_type: str = ""
    timestamp: int | float | None = None
    value: float | None = None


_encoder = msgspec.json.Encoder()


def encode(
    user_id: str,
    item_id: str,
    *,
    event_type: str = "click",
    timestamp_ms: int | None = None,
    value: float | None = None,
    event_id: str | None = None,
) -> bytes:
    """One event as a record's value: UTF-8 JSON. Raises ValueError for what no worker would take.

    `timestamp_ms`: milliseconds since the epoch, UTC; None leaves it to the record's own timestamp.
    """
    for name, text in (("user_id", user_id), ("item_id", item_id), ("event_id", event_id)):
        if text is not None and not 1 <= len(text.encode()) <= columns.MAX_ID_BYTES:
            raise ValueError(f"{name} must be 1 to {columns.MAX_ID_BYTES} bytes as UTF-8")
    if value is not None and not abs(value) < columns.FLOAT32_BELOW:
        raise ValueError(f"value must be finite in 32 bits, not {value}")
    timestamp = None if timestamp_ms is None else _wire_timestamp(timestamp_ms)
    return _encoder.encode(_WireEvent(event_id, user_id, item_id, event_type, timestamp, value))


def encode_forget(user_id: str, *, event_id: str | None = None, fields: Mapping[str, str] | None = None) -> bytes:
    """The event that erases a user, as a record's value whose fields lie where the settings' `fields` say.

    Raises ValueError for an id that no worker would take, or for places that exclude each other.
    """
    values = {"user_id": columns.to_id(user_id), "event_type": FORGET}
    if event_id is not None:
        values["event_id"] = columns.to_id(event_id)
    return _encoder.encode(FieldMap(fields or {}).document(values))


def _wire_timestamp(timestamp_ms: int) -> int | float:
    if not 0 <= timestamp_ms < columns.MAX_TIME_MS:
        raise ValueError(f"timestamp_ms must be from 0 to below 10**14, not {timestamp_ms}")
    # A small number is read as seconds, so a time before 1973 is written as seconds.
    return timestamp_ms if timestamp_ms >= columns.SECONDS_BELOW else timestamp_ms / 1000


class Decoder:
    """Turns the records of a poll into events; never raises for what they hold.

    Raises ValueError at construction for a field map that is wrong.
    """

    def __init__(self, settings: EventSettings) -> None:
        self._max_record_bytes = settings.max_record_bytes
        self._max_future_ms = settings.max_future_s * 1000
        self._fields = FieldMap(settings.fields)
        kinds = settings.types.values()
        self._codes = {name: code for code, name in enumerate([*settings.types, FORGET])}
        self._forget = self._codes[FORGET]
        self._observe = np.array([*(kind.observe for kind in kinds), False], dtype=np.bool_)
        self._weights = np.array([*(kind.weight for kind in kinds), 0.0], dtype=np.float32)

    def decode(self, values: Sequence[bytes | None], timestamps_ms: Sequence[int]) -> Decoded:
        """The events in `values`, whose records were written at `timestamps_ms` (negative: not known)."""
        records, rows, rejected = self._read(values)
        record_times = np.asarray(timestamps_ms, dtype=np.int64)[records]
        events, problems = self._checked(self._fields.columns(rows), record_times)
        events["records"] = records
        if problems:
            rejected += [Rejected(int(records[row]), *problem) for row, problem in problems.items()]
            events = _without(events, problems)
        rejected.sort()
        tombstones = len(values) - len(events["users"]) - len(rejected)
        return Decoded(**events, rejected=rejected, tombstones=tombstones)

    def _read(self, values: Sequence[bytes | None]) -> tuple[_Index, list[Any], list[Rejected]]:
        """The records that are JSON objects, as indices and rows, and those that are not."""
        all_rows = self._read_all(values)
        if all_rows is not None:
            return np.arange(len(values), dtype=np.int32), all_rows, []
        rows: dict[int, Any] = {}
        rejected = []
        for record, value in enumerate(values):
            if value is None:
                continue
            row = self._read_one(value)
            if isinstance(row, _Problem):
                rejected.append(Rejected(record, *row))
            else:
                rows[record] = row
        return np.array(list(rows), dtype=np.int32), list(rows.values()), rejected

    def _read_all(self, values: Sequence[bytes | None]) -> list[Any] | None:
        """A row for each record, or None unless all of them are sound: the usual case, in the fast way."""
        present = [value for value in values if value is not None]
        if len(present) < len(values) or max(map(len, present), default=0) > self._max_record_bytes:
            return None
        try:
            # The JSON decoder does not look at the encoding of what it skips.
            b"\n".join(present).decode()
            # One by one: as fast as one array of all, in which a torn record could borrow from the next.
            return list(map(self._fields.read, present))
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
            return None

    def _read_one(self, value: bytes) -> Any:
        """The row of a record that may hold anything, or its _Problem."""
        if len(value) > self._max_record_bytes:
            return _Problem(Reason.TOO_LARGE, f"{len(value)} bytes, more than {self._max_record_bytes}")
        try:
            text = value.decode()
            return self._fields.read_carefully(value)
        except UnicodeDecodeError as error:
            return _Problem(Reason.NOT_UTF8, f"{error.reason} (byte {error.start})")
        except RecursionError:
            return _Problem(Reason.NOT_JSON, "nested too deeply")
        except msgspec.ValidationError as error:
            return _Problem(Reason.NOT_OBJECT, str(error))
        except msgspec.DecodeError as error:
            return self._blame(text) or _Problem(Reason.NOT_JSON, str(error))

    def _blame(self, text: str) -> _Problem | None:
        """The field that keeps `text` from being JSON: many producers write NaN, or half a surrogate pair."""
        try:
            fields = self._fields.read_parsed(json.loads(text))
        except (ValueError, RecursionError):
            return None
        _, problems = self._checked([[field] for field in fields], np.zeros(1, dtype=np.int64))
        return problems.get(0)

    def _checked(self, raw: list[list[Any]], record_times: _Times) -> tuple[dict[str, Any], dict[int, _Problem]]:
        """The columns of Decoded, and the first problem of each row that is no event."""
        problems: dict[int, _Problem] = {}

        def take(reason: Reason, field: str, checked: tuple[T, columns.Problems]) -> T:
            column, details = checked
            for row, detail in details.items():
                problems.setdefault(row, _Problem(reason, f"{field} {detail}"))
            return column

        users, items, types, times, values, event_ids = raw
        codes, bad_types = columns.codes(types, self._codes)
        forget = codes == self._forget
        if forget.any():
            items = [_NO_ITEM if gone else item for item, gone in zip(items, forget.tolist(), strict=True)]
        # In the order of Reason.
        events: dict[str, Any] = {
            "users": take(Reason.BAD_USER_ID, "user_id", columns.ids(users)),
            "items": take(Reason.BAD_ITEM_ID, "item_id", columns.ids(items)),
        }
        take(Reason.BAD_EVENT_TYPE, "event_type", (codes, bad_types))
        events |= {"observe": self._observe[codes], "weights": self._weights[codes], "forget": forget}
        times_ms = take(Reason.BAD_TIMESTAMP, "timestamp", columns.times_ms(times, record_times))
        take(Reason.FUTURE_TIMESTAMP, "timestamp", self._future(times_ms, record_times))
        return events | {
            "times_ms": times_ms,
            "values": take(Reason.BAD_VALUE, "value", columns.values(values)),
            "event_ids": take(Reason.BAD_EVENT_ID, "event_id", columns.optional_ids(event_ids)),
        }, problems

    def _future(self, times_ms: _Times, record_times: _Times) -> tuple[_Times, columns.Problems]:
        ahead = (times_ms - self._max_future_ms > record_times) & (record_times >= 0)
        detail = f"is over {self._max_future_ms // 1000} s after the record's own"
        return times_ms, dict.fromkeys(np.flatnonzero(ahead).tolist(), detail)


def _without(events: dict[str, Any], problems: dict[int, _Problem]) -> dict[str, Any]:
    keep = [row for row in range(len(events["users"])) if row not in problems]
    return {
        name: [column[row] for row in keep] if isinstance(column, list) else column[keep]
        for name, column in events.items()
    }
