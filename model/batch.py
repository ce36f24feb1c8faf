"""Columns of events on their way through the learner."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in order of arrival, named by their external ids; entry i of every column is event i."""

    users: list[str]
    items: list[str]
    observe: Bool  # (n,) enters the user's history and counts as seen
    weights: Float32  # (n,) of its gradient; 0 = none, negative = a negative example

    def __len__(self) -> int:
        return len(self.users)

    def part(self, start: int, stop: int) -> "EventBatch":
        """Events `start` up to, not including, `stop`."""
        return EventBatch(
            self.users[start:stop], self.items[start:stop], self.observe[start:stop], self.weights[start:stop]
        )


@dataclass(frozen=True, slots=True)
class PastEvents:
    """Events that were observed, by row. (user, position) is what stands for the history before an event."""

    users: Int32  # (n,) user rows; 0 = evicted since
    items: Int32  # (n,) item rows; 0 = evicted since
    positions: Int64  # (n,) clicks in the user's log before this event
    weights: Float32  # (n,)
    sequence: Int64  # (n,) number of the event in the model's whole life

    def __len__(self) -> int:
        return len(self.users)

    def part(self, rows: slice) -> "PastEvents":
        """The events of a slice."""
        return PastEvents(*(getattr(self, name)[rows] for name in PastEvents.__slots__))

    def where(self, chosen: Bool) -> "PastEvents":
        """The `chosen` (n,) events, in order."""
        return PastEvents(*(getattr(self, name)[chosen] for name in PastEvents.__slots__))


def joined(parts: Sequence[PastEvents]) -> PastEvents:
    """All events of `parts`, in order."""
    columns = (np.int32, np.int32, np.int64, np.float32, np.int64)
    empty = PastEvents(*(np.empty(0, dtype) for dtype in columns))  # type: ignore[arg-type]
    return PastEvents(*(np.concatenate([getattr(p, name) for p in (empty, *parts)]) for name in PastEvents.__slots__))


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """What one optimizer step learns from, on the device. Rows are local: indices into the `*_rows` columns."""

    user_rows: Tensor  # (V,) distinct rows of the user tables
    item_rows: Tensor  # (U,) distinct rows of the item tables
    users: Tensor  # (B,)
    history: Tensor  # (B, L) newest first
    present: Tensor  # (B, L) True where the history holds an item
    positives: Tensor  # (B,)
    positive_log_q: Tensor  # (B,)
    negatives: Tensor  # (K,)
    negative_log_q: Tensor  # (K,)
    blocked: Tensor  # (B, K) the negative is none for this sample
    weights: Tensor  # (B,)
    neighbours: Tensor  # (M, K) of the first M item rows, which are those that the columns above name

    def __len__(self) -> int:
        return len(self.weights)

    def part(self, start: int, stop: int) -> "TrainingBatch":
        """Samples `start` up to, not including, `stop`; the rows, negatives and neighbours are shared."""
        samples = ("users", "history", "present", "positives", "positive_log_q", "blocked", "weights")
        return replace(self, **{name: getattr(self, name)[start:stop] for name in samples})
