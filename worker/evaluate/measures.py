"""What is measured of a recommender: accuracy, and what its lists are like beside it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.batch import Bool, Float32, Float64, Int32, Int64
from model.kernels import kernel
from model.metrics import Curve, K, figures
from worker.evaluate.stream import EventStream

WINDOWS = 20
FEW_CLICKS = 5  # an item with fewer is new
FIGURES = ("recall_at_10", "ndcg_at_10", "mrr_at_10")


@kernel
def _look(
    numbers: Int64,
    top: Int32,
    users: Int32,
    items: Int32,
    positive: Bool,
    vectors: Float32,
    clicks: Int64,
    counted: Int64,
    previous: Int32,
    shown: Bool,
    sums: Float64,
) -> None:
    """Add the lists `top` (n, K) of events `numbers` (n,) to `sums`; what is counted on the way is described below."""
    for n in range(numbers.shape[0]):
        while counted[0] < numbers[n]:  # clicks before this event
            clicks[items[counted[0]]] += positive[counted[0]]
            counted[1] += positive[counted[0]]
            counted[0] += 1
        user, length, repeated, information = users[numbers[n]], 0, 0, 0.0
        total = np.zeros(vectors.shape[1])
        for k in range(K):
            item = top[n, k]
            if item < 0:
                break
            length += 1
            shown[item] = True
            information -= np.log2(max(1, clicks[item]) / max(1, counted[1]))
            for v in range(vectors.shape[1]):
                total[v] += vectors[item, v]
            for j in range(K):
                repeated += previous[user, j] == item
        if previous[user, 0] >= 0 and length:
            sums[0] += repeated / length
            sums[1] += 1
        sums[2] += information
        sums[3] += length
        if length > 1:
            squared = 0.0
            for v in range(vectors.shape[1]):
                squared += total[v] * total[v]
            sums[4] += 1 - (squared - length) / (length * (length - 1))  # the vectors are of length 1
            sums[5] += 1
        previous[user] = top[n]


class Measures:
    """Takes what one recommender made of each event, in order.

    coverage: share of all items that were in anyone's list. novelty: mean self-information of what was recommended,
    −log2 of the item's share of the clicks so far, in bits. repetition: share of a list that was in the same user's
    list before. diversity: 1 − mean cosine of the pairs of a list.
    """

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._ranks: list[Int64] = []
        self._numbers: list[Int64] = []
        items = len(stream.item_ids)
        self._clicks, self._counted = np.zeros(items, np.int64), np.zeros(2, np.int64)
        self._previous = np.full((len(stream.user_ids), K), -1, np.int32)
        self._shown = np.zeros(items, np.bool_)
        self._sums = np.zeros(6)

    def add(self, numbers: Int64, ranks: Int64, top: Int32) -> None:
        """Events by number (n,), 0-based ranks of their items (n,), -1 = a miss, and lists (n, 10), -1 = no item."""
        self._ranks.append(ranks)
        self._numbers.append(numbers)
        stream = self._stream
        _look(
            numbers, top, stream.users, stream.items, stream.positive, stream.item_vectors,
            self._clicks, self._counted, self._previous, self._shown, self._sums,
        )  # fmt: skip

    def report(self) -> dict[str, Any]:
        """All figures, by name."""
        ranks = np.concatenate([np.empty(0, np.int64), *self._ranks])
        curve = Curve(1)
        curve.add(ranks)
        last_half = {f"{name}_last_half": value for name, value in curve.mean(0.5).items()}
        return {**curve.mean(), **last_half, "events": len(ranks), **self._few_clicks(ranks), **self._lists()} | {
            "over_time": windows(ranks)
        }

    def _few_clicks(self, ranks: Int64) -> dict[str, float]:
        numbers = np.concatenate([np.empty(0, np.int64), *self._numbers])
        few = self._stream.clicks_before[numbers] < FEW_CLICKS
        return {"recall_at_10_few_clicks": _mean(ranks[few])[0], "events_few_clicks": int(few.sum())}

    def _lists(self) -> dict[str, float]:
        repeated, lists, information, shown, dissimilarity, of = self._sums.tolist()
        return {
            "coverage": float(self._shown.mean()),
            "novelty_bits": information / max(1.0, shown),
            "repetition": repeated / max(1.0, lists),
            "diversity": dissimilarity / max(1.0, of),
        }


def windows(ranks: Int64) -> list[dict[str, float]]:
    """The figures of equal parts of the stream, each with the number of the event after its last."""
    parts = np.array_split(ranks, min(WINDOWS, max(1, len(ranks))))
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return [
        {"until": end, **dict(zip(FIGURES, _mean(part).tolist(), strict=True))}
        for end, part in zip(ends, parts, strict=True)
    ]


def _mean(ranks: Int64) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = figures(ranks).sum(0) / max(1, len(ranks))
    return mean
