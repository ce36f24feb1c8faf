"""Ratings and what is known beside them, out of the lines that the replay tool writes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from model.batch import Float32, Int64
from model.ratings.data import Ratings, SideInformation
from worker.evaluate.dataset import EvaluationError

_BINS = 8  # that a number (an age, a year) falls into
_MOST_WORDS = 64  # of an attribute, the most frequent first


class _Line(msgspec.Struct):
    """A description or an event; unknown fields are ignored."""

    describes: str = ""
    user_id: str = ""
    item_id: str = ""
    value: float | None = None
    attributes: dict[str, Any] = {}
    name: str = ""
    test: list[int] = []


@dataclass(frozen=True, slots=True)
class RatingData:
    """A data set of ratings. A pair that was rated again counts once, with its last rating."""

    ratings: Ratings
    side: SideInformation
    folds: dict[str, Int64]  # the data set's own: indices of the test ratings, by name
    repeated: int  # ratings that a later one of the same pair replaced


class _Reader:
    """Takes the lines of a file apart."""

    def __init__(self, path: Path) -> None:
        self.people: dict[str, dict[str, Any]] = {}
        self.things: dict[str, dict[str, Any]] = {}
        self.folds: dict[str, list[int]] = {}
        self.rated: list[tuple[str, str, float]] = []
        self.unrated = 0
        decoder = msgspec.json.Decoder(_Line)
        with path.open("rb") as lines:
            for line in lines:
                self._take(decoder.decode(line))

    def _take(self, line: _Line) -> None:
        if line.describes == "user":
            self.people[line.user_id] = line.attributes
        elif line.describes == "item":
            self.things[line.item_id] = line.attributes
        elif line.describes == "fold":
            self.folds[line.name] = line.test
        elif line.value is None:
            self.unrated += 1
        else:
            self.rated.append((line.user_id, line.item_id, line.value))


def read_rating_data(path: Path, name: str) -> RatingData:
    """Ratings, side information and folds of a file of lines. EvaluationError where there is nothing to learn."""
    found = _Reader(path)
    if found.unrated:
        raise EvaluationError(f"{name}: {found.unrated:,} of its events have no rating (value)")
    if len(found.rated) < 100:
        raise EvaluationError(f"{name}: {len(found.rated)} ratings are too few to be split")
    users, items, values = zip(*found.rated, strict=True)
    user_rows, user_ids = _numbered(users)
    item_rows, item_ids = _numbered(items)
    if min(values) == max(values):
        raise EvaluationError(f"{name}: all its ratings are {values[0]:g}")
    ratings = Ratings(user_rows, item_rows, np.array(values, np.float32))
    side = SideInformation(
        encode([found.people.get(user, {}) for user in user_ids]),
        encode([found.things.get(item, {}) for item in item_ids]),
    )
    last = _last_of_each_pair(ratings)
    return RatingData(ratings.part(last), side, _renumbered(found.folds, last), len(ratings) - len(last))


def _numbered(names: Sequence[str]) -> tuple[Int64, list[str]]:
    numbers: dict[str, int] = {}
    rows = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
    return rows, list(numbers)


def _last_of_each_pair(ratings: Ratings) -> Int64:
    """Else a rating in the test could have its repetition among those that are learned from."""
    pairs = ratings.users * (ratings.items.max() + 1) + ratings.items
    _, from_behind = np.unique(pairs[::-1], return_index=True)
    return np.sort(len(pairs) - 1 - from_behind)


def _renumbered(folds: Mapping[str, Sequence[int]], kept: Int64) -> dict[str, Int64]:
    return {name: np.flatnonzero(np.isin(kept, np.asarray(test, np.int64))) for name, test in folds.items()}


def encode(described: Sequence[Mapping[str, Any]]) -> Float32:
    """Attributes as columns (n, F) of 0 and 1: a column a word of a text or list, a column a bin of a number."""
    names = sorted({name for attributes in described for name in attributes})
    columns = [column for name in names for column in _columns([attributes.get(name) for attributes in described])]
    return np.stack(columns, axis=1) if columns else np.zeros((len(described), 0), np.float32)


def _columns(values: Sequence[Any]) -> Iterator[Float32]:
    numbers = [value for value in values if isinstance(value, int | float)]
    if numbers:
        edges = np.unique(np.quantile(numbers, np.linspace(0, 1, _BINS + 1)[1:-1]))
        bins = [int(np.searchsorted(edges, v, "right")) if isinstance(v, int | float) else -1 for v in values]
        yield from ((np.array(bins) == n).astype(np.float32) for n in range(len(edges) + 1))
        return
    words = [[value] if isinstance(value, str) else value if isinstance(value, list) else [] for value in values]
    counts = Counter(word for some in words for word in some if isinstance(word, str))
    for word, _ in sorted(counts.most_common(_MOST_WORDS)):
        yield np.array([word in some for some in words], np.float32)
