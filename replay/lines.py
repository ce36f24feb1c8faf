"""Writes events as lines of JSON instead of sending them."""

from typing import BinaryIO

from replay.producer import DeliveryError


class LineWriter:
    """A sink for `runner.replay`: one record a line, as Kafka would hold its value."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.delivered = 0
        self.next_number: int | None = None

    def send(self, number: int, key: str, value: bytes) -> None:  # noqa: ARG002
        """Write a line; the key is in the value already. Raises DeliveryError when nobody reads any more."""
        try:
            self._out.write(value + b"\n")
        except OSError as error:
            raise DeliveryError(f"the output cannot be written: {error.strerror}") from error
        self.delivered += 1

    def flush(self, timeout_s: float = 0.0) -> None:  # noqa: ARG002
        """Everything is out when this returns. Raises DeliveryError."""
        try:
            self._out.flush()
        except OSError as error:
            raise DeliveryError(f"the output cannot be written: {error.strerror}") from error
