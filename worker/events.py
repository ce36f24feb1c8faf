"""The wire contract: what a record's value may hold, and how it becomes events."""

import math

import msgspec

MAX_ID_BYTES = 256


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
    """One event as a record's value: UTF-8 JSON. Raises ValueError for what `Decoder` would reject.

    `timestamp_ms`: milliseconds since the epoch, UTC; None leaves it to the record's own timestamp.
    """
    for name, text in (("user_id", user_id), ("item_id", item_id), ("event_id", event_id)):
        if text is not None and not 1 <= len(text.encode()) <= MAX_ID_BYTES:
            raise ValueError(f"{name} must be 1 to {MAX_ID_BYTES} bytes as UTF-8")
    if value is not None and not math.isfinite(value):
        raise ValueError(f"value must be finite, not {value}")
    timestamp = None if timestamp_ms is None else _wire_timestamp(timestamp_ms)
    return _encoder.encode(_WireEvent(event_id, user_id, item_id, event_type, timestamp, value))


def _wire_timestamp(timestamp_ms: int) -> int | float:
    if not 0 <= timestamp_ms < 10**14:
        raise ValueError(f"timestamp_ms must be from 0 to 10**14, not {timestamp_ms}")
    # A small number is read as seconds, so a time before 1973 is written as seconds.
    return timestamp_ms if timestamp_ms >= 10**11 else timestamp_ms / 1000
