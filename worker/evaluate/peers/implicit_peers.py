"""The `implicit` library: ALS and item-kNN, fitted again every 1,000 events on everything so far."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from implicit.cpu.als import AlternatingLeastSquares
from implicit.nearest_neighbours import BM25Recommender
from scipy.sparse import csr_matrix
from threadpoolctl import threadpool_limits

from model.batch import Float32, Float64, Int32

_EVERY = 1000


@contextmanager
def _as_its_authors_advise() -> Iterator[None]:
    """One thread of BLAS beside the library's own, without its warnings about that and about its own conversions."""
    with warnings.catch_warnings(), threadpool_limits(1, "blas"):
        warnings.simplefilter("ignore")
        yield


class _Refitted:
    """Keeps all clicks and fits anew now and then."""

    def __init__(self, users: int, items: int) -> None:
        self._shape = (users, items)
        self._users: list[int] = []
        self._items: list[int] = []

    def learn(self, user: int, clicked: Int32, item: int) -> None:  # noqa: ARG002
        """Keep the click; every 1,000, fit."""
        self._users.append(user)
        self._items.append(item)
        if len(self._users) % _EVERY == 0:
            clicks = csr_matrix((np.ones(len(self._users), np.float32), (self._users, self._items)), self._shape)
            clicks.data[:] = 1
            with _as_its_authors_advise():
                self._fit(clicks)

    def _fit(self, clicks: csr_matrix) -> None:
        raise NotImplementedError


class ImplicitAls(_Refitted):
    """Factors by alternating least squares; a user's are found anew from its clicks before each event (fold-in)."""

    name = "implicit_als"

    def __init__(
        self, users: int, items: int, factors: int = 32, regularization: float = 0.1, alpha: float = 5.0,
        iterations: int = 3, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(users, items)
        self.settings: dict[str, Any] = {
            "factors": factors, "regularization": regularization, "alpha": alpha, "iterations": iterations,
            "refit_every": _EVERY, "fold_in": "per event", "seed": seed,
        }  # fmt: skip
        with _as_its_authors_advise():
            self._model = AlternatingLeastSquares(
                factors=factors, regularization=regularization, alpha=alpha, iterations=iterations, num_threads=1,
                random_state=seed,
            )  # fmt: skip
        self._factors: Float32 | None = None

    def _fit(self, clicks: csr_matrix) -> None:
        self._model.fit(clicks, show_progress=False)  # goes on from the factors it has
        self._factors = self._model.item_factors

    def score(self, user: int, clicked: Int32, scores: Float64) -> None:  # noqa: ARG002
        """Dot products of the folded-in user; an item that was not there at the last fit has 0."""
        if self._factors is None or not len(clicked):
            scores[:] = 0
            return
        row = csr_matrix((np.ones(len(clicked), np.float32), clicked, [0, len(clicked)]), (1, self._shape[1]))
        scores[:] = self._factors[: len(scores)] @ self._model.recalculate_user(0, row)


class ImplicitBm25(_Refitted):
    """Item-kNN with BM25 weights; a user's clicks are those before each event."""

    name = "implicit_bm25"

    def __init__(self, users: int, items: int, neighbours: int = 100, k1: float = 1.2, b: float = 0.75) -> None:
        super().__init__(users, items)
        self.settings: dict[str, Any] = {"neighbours": neighbours, "k1": k1, "b": b, "refit_every": _EVERY}
        self._model = BM25Recommender(K=neighbours, K1=k1, B=b, num_threads=1)

    def _fit(self, clicks: csr_matrix) -> None:
        self._model.fit(clicks, show_progress=False)

    def score(self, user: int, clicked: Int32, scores: Float64) -> None:  # noqa: ARG002
        """Sums of the similarities to what was clicked."""
        scores[:] = 0
        similarity = self._model.similarity
        if similarity is None:
            return
        for item in clicked.tolist():
            row = slice(similarity.indptr[item], similarity.indptr[item + 1])
            scores[similarity.indices[row]] += similarity.data[row]
