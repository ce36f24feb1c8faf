"""Ratings in columns, what is known of users and items, and how both are split."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.batch import Bool, Float32, Int64


@dataclass(frozen=True, slots=True)
class Ratings:
    """Entry i of every column is rating i."""

    users: Int64  # (n,) user rows
    items: Int64  # (n,) item rows
    values: Float32  # (n,)

    def __len__(self) -> int:
        return len(self.values)

    def part(self, chosen: NDArray[np.int64] | Bool) -> "Ratings":
        """The `chosen` ratings: indices, or a flag each."""
        return Ratings(self.users[chosen], self.items[chosen], self.values[chosen])


@dataclass(frozen=True, slots=True)
class SideInformation:
    """What is known beside the ratings, as numbers about 0 to 1; F may be 0."""

    users: Float32  # (U, F_users)
    items: Float32  # (I, F_items)

    def __bool__(self) -> bool:
        return bool(self.users.size or self.items.size)

    @staticmethod
    def none(users: int, items: int) -> "SideInformation":
        """Nothing is known of so many users and items."""
        return SideInformation(np.zeros((users, 0), np.float32), np.zeros((items, 0), np.float32))


@dataclass(frozen=True, slots=True)
class Split:
    """Indices of ratings. Models learn from `train`; `validation` picks settings and epoch; `test` is only scored."""

    name: str
    seed: int
    train: Int64
    validation: Int64
    test: Int64


VALIDATION_SHARE = 0.1  # of the ratings that are no test: of 80,000 that is 72,000 to learn from, 8,000 to choose by


def random_split(count: int, seed: int) -> Split:
    """80% of `count` ratings to learn from and choose by, 20% to test."""
    shuffled = np.random.default_rng((seed, 1)).permutation(count)
    known = count - count // 5
    return _split("random", seed, shuffled[:known], shuffled[known:])


def fold_split(name: str, test: Int64, count: int, seed: int) -> Split:
    """One fold: its `test` ratings, and a seeded choice of the others for validation."""
    known = np.setdiff1d(np.arange(count), test)
    return _split(name, seed, np.random.default_rng((seed, 2)).permutation(known), test)


def random_folds(count: int, seed: int, folds: int = 5) -> Sequence[Int64]:
    """Test ratings of a seeded cross-validation, for data sets that come without folds of their own."""
    return np.array_split(np.random.default_rng((seed, 3)).permutation(count), folds)


def _split(name: str, seed: int, known: Int64, test: Int64) -> Split:
    validation = round(VALIDATION_SHARE * len(known))
    return Split(name, seed, np.sort(known[validation:]), np.sort(known[:validation]), np.sort(test))
