"""The wire contract of the items topic: what a record may say of an item.

A value is `{"item_id", "title", "attributes": {...}, "available": true, "timestamp"}`; only `item_id` is needed, and
the newest record of an item is all that is known of it. A record without a value withdraws the description of the
item that its key names. What the grammar leaves open is as in `worker.events`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from worker import event_columns as columns
from worker.events import Reason, Rejected
from worker.settings import EventSettings, ItemSettings
from worker.source import Records

T = TypeVar("T")

MAX_DEPTH = 8  # of the attributes: an array or object inside another counts one


class Description(NamedTuple):
    """What is known of one item."""

    title: str = ""
    attributes: bytes = b"{}"  # a JSON object, UTF-8, as short as it can be written
    available: bool = True


@dataclass(slots=True)
class DecodedItems:
    """The records of one poll; each is in exactly one place."""

    # (item id, what is known from now on, None = nothing any more), in order
    changes: list[tuple[str, Description | None]] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)  # in the order of the records
    tombstones: int = 0  # without a key that is an item's id


_NOTHING = msgspec.Raw(b"null")


class _Row(msgspec.Struct, gc=False):
    """The fields as they are written: what one of them holds is its own matter, and others are skipped."""

    item_id: msgspec.Raw = _NOTHING
    title: msgspec.Raw = _NOTHING
    attributes: msgspec.Raw = _NOTHING
    available: msgspec.Raw = _NOTHING
    timestamp: msgspec.Raw = _NOTHING


_row = msgspec.json.Decoder(_Row)
_any = msgspec.json.Decoder()


class _ProblemError(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class ItemDecoder:
    """Turns the records of a poll into descriptions; never raises for what they hold."""

    def __init__(self, events: EventSettings, items: ItemSettings) -> None:
        self._max_record_bytes, self._max_future_ms = events.max_record_bytes, events.max_future_s * 1000
        self._max_title_bytes, self._max_attributes_bytes = items.max_title_bytes, items.max_attributes_bytes

    def decode(self, records: Records) -> DecodedItems:
        """What `records` say."""
        decoded = DecodedItems()
        for index, (value, time_ms) in enumerate(zip(records.values, records.timestamps_ms, strict=True)):
            try:
                if value is not None:
                    decoded.changes.append(self._described(value, time_ms))
                elif (withdrawn := _key(records.origin(index).key)) is not None:
                    decoded.changes.append((withdrawn, None))
                else:
                    decoded.tombstones += 1
            except _ProblemError as problem:
                decoded.rejected.append(Rejected(index, problem.reason, problem.detail))
        return decoded

    def _described(self, value: bytes, record_ms: int) -> tuple[str, Description]:
        """The fields are looked at in the order of Reason."""
        row = self._read(value)
        item_id = _checked(Reason.BAD_ITEM_ID, "item_id", columns.to_id, row.item_id)
        time_ms = _checked(Reason.BAD_TIMESTAMP, "timestamp", columns.to_optional_ms, row.timestamp)
        if time_ms is not None and record_ms >= 0 and time_ms - self._max_future_ms > record_ms:
            detail = f"timestamp is over {self._max_future_ms // 1000} s after the record's own"
            raise _ProblemError(Reason.FUTURE_TIMESTAMP, detail)
        title = _checked(Reason.BAD_TITLE, "title", self._title, row.title)
        attributes = _checked(Reason.BAD_ATTRIBUTES, "attributes", self._attributes, row.attributes)
        available = _checked(Reason.BAD_AVAILABLE, "available", _available, row.available)
        return item_id, Description(title, attributes, available)

    def _read(self, value: bytes) -> "_Row":
        if len(value) > self._max_record_bytes:
            raise _ProblemError(Reason.TOO_LARGE, f"{len(value)} bytes, more than {self._max_record_bytes}")
        try:
            value.decode()
            return _row.decode(value)
        except UnicodeDecodeError as error:
            raise _ProblemError(Reason.NOT_UTF8, f"{error.reason} (byte {error.start})") from None
        except RecursionError:
            raise _ProblemError(Reason.NOT_JSON, "nested too deeply") from None
        except msgspec.ValidationError as error:
            raise _ProblemError(Reason.NOT_OBJECT, str(error)) from None
        except msgspec.DecodeError as error:
            raise _ProblemError(Reason.NOT_JSON, str(error)) from None

    def _title(self, value: object) -> str:
        if value is None:
            return ""
        if not isinstance(value, str):
            raise ValueError("is not a string")
        if len(value.encode()) > self._max_title_bytes:
            raise ValueError(f"is longer than {self._max_title_bytes} bytes")
        return value

    def _attributes(self, value: object) -> bytes:
        if value is None:
            return b"{}"
        if not isinstance(value, dict):
            raise ValueError("is not an object")
        if _is_deeper(value, MAX_DEPTH):
            raise ValueError(f"is nested more than {MAX_DEPTH} deep")
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        if len(text) > self._max_attributes_bytes:
            raise ValueError(f"is {len(text)} bytes of JSON, more than {self._max_attributes_bytes}")
        return text


def _checked(reason: Reason, name: str, convert: Callable[[Any], T], raw: msgspec.Raw) -> T:
    try:
        return convert(_any.decode(raw))
    except RecursionError:
        raise _ProblemError(reason, f"{name} is nested too deeply") from None
    except (ValueError, msgspec.MsgspecError) as error:  # numbers out of range, half a surrogate pair
        raise _ProblemError(reason, f"{name} {error}") from None


def _available(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, bool):
        raise ValueError("is not a boolean")
    return value


def _key(key: bytes | None) -> str | None:
    """The item id that a record's key is; None where it is none."""
    try:
        return None if key is None else columns.to_id(key.decode())
    except ValueError:
        return None


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner: Sequence[object] = list(value.values()) if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)
