"""What readers get: vectors whose dot product is the score, and each user's best items.

A fused score has logarithms of sparse counts in it and is no dot product of short vectors. But readers only rank, and
only the top matters. So each item carries a fixed random code, besides the family's vector and its steady features;
and a user's vector is moved just so far that the products with its best items are their full scores: the least change,
by its mean square over all items, that does so (kernel ridge regression on those few items). Random codes of some
dozen components tell a handful of items apart among very many (Johnson & Lindenstrauss 1984).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model.batch import Float32, Int32
from model.config import ModelConfig
from model.fusion import OF_ITEM, STEADY, Fusion
from model.recommender import Recommender
from model.sampling import generator

FITTED = 20  # best items whose scores a user's vector is made to meet
_RIDGE = 1e-2  # of the fit, by the mean of its diagonal
_UNIT = 0.125  # of a published item feature, which is a logarithm up to 10 or so: about as long as a code
_SAMPLE = 1024  # about so many items stand for all of them
_CODES_AT_ONCE = 1024  # rows of codes that one generator makes


class ItemCodes:
    """A fixed random sign vector for each item row, of length 1."""

    def __init__(self, width: int, seed: int) -> None:
        self._width, self._seed = width, seed
        self._codes = np.empty((0, width), np.float32)

    def first(self, rows: int) -> Float32:
        """The codes (rows, width) of the first `rows` item rows."""
        while len(self._codes) < rows:
            rng = generator(self._seed, "codes", len(self._codes) // _CODES_AT_ONCE)
            signs = rng.integers(0, 2, (_CODES_AT_ONCE, self._width), dtype=np.int8)
            self._codes = np.concatenate([self._codes, ((2.0 * signs - 1.0) / np.sqrt(self._width)).astype(np.float32)])
        return self._codes[:rows]


@dataclass(frozen=True, slots=True)
class Best:
    """The best items of some users by the full score, best first; row 0 where there are no more."""

    items: Int32  # (B, n) item rows
    scores: Float32  # (B, n)

    @staticmethod
    def joined(parts: "Sequence[Best]", count: int) -> "Best":
        """All users of `parts`, each with the first `count` items."""
        none = Best(np.empty((0, count), np.int32), np.empty((0, count), np.float32))
        columns = [(part.items[:, :count], part.scores[:, :count]) for part in parts] or [(none.items, none.scores)]
        return Best(*(np.concatenate(column) for column in zip(*columns, strict=True)))


class Fit:
    """Moves users' vectors so that their products with their best items are the full scores."""

    def __init__(self, items: Tensor, moved: Sequence[int]) -> None:
        """items (rows, dim): vectors of all items; row 0 is nobody's. moved: the K components that may be moved."""
        self._items, self._moved = items, torch.tensor(moved, device=items.device)
        sample = items[1 :: 1 + len(items) // _SAMPLE][
            :, self._moved
        ].double()  # so that users in other company get the same digits
        gram = sample.T @ sample / max(1, len(sample))
        gram += 1e-3 * gram.diagonal().mean().clamp_min(1e-6) * torch.eye(len(gram), device=gram.device)
        self._inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))  # (K, K)

    def move(self, vectors: Tensor, best: Best) -> None:
        """Move users' `vectors` (B, dim) in place, until their products with their best items are the scores."""
        best_rows = torch.from_numpy(best.items[:, :FITTED]).to(vectors.device, torch.int64)  # (B, n), 0 = none
        scores = torch.from_numpy(best.scores[:, :FITTED]).to(vectors.device)
        items = self._items[best_rows]  # (B, n, dim)
        missing = torch.where(best_rows > 0, scores - (items @ vectors.unsqueeze(2)).squeeze(2), 0.0)
        rows = items[:, :, self._moved].double() * (best_rows > 0).unsqueeze(2)  # (B, n, K)
        spread = rows @ self._inverse
        kernel = spread @ rows.transpose(1, 2)  # (B, n, n)
        ridge = _RIDGE * kernel.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-6)
        kernel = kernel + ridge[:, None, None] * torch.eye(rows.shape[1], device=rows.device)
        solved = torch.linalg.solve(kernel, missing.double().unsqueeze(2))
        vectors[:, self._moved] += (spread * solved).sum(1).float()


class Readout:
    """Makes what is published out of the family, the fusion (None = the family alone) and the item codes."""

    def __init__(self, config: ModelConfig, family: Recommender, fusion: Fusion | None) -> None:
        self._family, self._fusion = family, fusion
        self._codes = ItemCodes(config.codes, config.seed)
        self.dim = family.dim + (STEADY + config.codes if fusion else 0)  # of the published vectors
        self.exact = family.exact and fusion is None  # a product of published vectors is the score itself

    def items(self, rows: int) -> Tensor:
        """Vectors (rows, dim) of all item rows: [the family's, steady item features, code]."""
        vectors = self._family.item_vectors(slice(0, rows))
        if not self._fusion:
            return vectors
        others = np.concatenate([_UNIT * self._fusion.of_item[:, :STEADY], self._codes.first(rows)], axis=1)
        return torch.cat([vectors, torch.from_numpy(others).to(vectors.device)], dim=1)

    def fit(self, items: Tensor) -> Fit:
        """What fits users' vectors to all items' vectors `items` (rows, dim)."""
        width = self._family.dim
        return Fit(items, [*range(width), *range(width + STEADY, self.dim)])

    def users(self, users: Tensor, history: Int32) -> Tensor:
        """Vectors (B, dim) of user rows (B,) with histories (B, L), not fitted yet.

        Only the family's part and the steady item features are in them.
        """
        vectors = self._family.user_vectors(users, torch.from_numpy(history).to(users.device))
        if not self._fusion:
            return vectors
        weights = torch.from_numpy(self._fusion.by_user(history)).to(users.device)
        of_item = weights[:, OF_ITEM][:, :STEADY] / _UNIT
        codes = vectors.new_zeros(len(vectors), self.dim - vectors.shape[1] - of_item.shape[1])
        return torch.cat([vectors * weights[:, :1], of_item, codes], dim=1)

    def scores(self, users: Tensor, history: Int32, rows: int) -> Tensor:
        """The full scores (B, rows) of all items for user rows (B,) with histories (B, L)."""
        scores = self._family.full_scores(users, torch.from_numpy(history).to(users.device), rows)
        return torch.from_numpy(self._fusion.scores(scores.cpu().numpy(), history)) if self._fusion else scores


def diverse(best: Best, items: Tensor, count: int, diversity: float) -> Best:
    """`count` of the `best` items, chosen by maximal marginal relevance (Carbonell & Goldstein 1998).

    One after the other, the item with the largest (1 − diversity) · relevance − diversity · likeness: relevance is the
    score, between 0 for the last of `best` and 1 for the first; likeness the largest cosine of its vector with that of
    an item chosen before it. items (rows, d): the families' vectors.
    """
    rows = torch.from_numpy(best.items).to(items.device, torch.int64)
    scores = torch.from_numpy(best.scores).to(items.device)
    there = rows > 0
    lowest = scores.masked_fill(~there, float("inf")).amin(1, keepdim=True)
    relevance = (scores - lowest) / (scores[:, :1] - lowest).clamp_min(1e-9)
    vectors = F.normalize(items[rows], dim=2)
    cosines = vectors @ vectors.transpose(1, 2)  # (B, n, n)
    value = ((1 - diversity) * relevance).masked_fill(~there, -1e9)
    likeness, chosen = torch.zeros_like(scores), []
    for place in range(min(count, rows.shape[1])):
        at = (value - diversity * likeness).argmax(1, keepdim=True)  # (B, 1)
        chosen.append(at)
        value = value.scatter(1, at, -2e9)
        near = cosines.gather(1, at.unsqueeze(2).expand(-1, -1, cosines.shape[2])).squeeze(1)
        likeness = near if place == 0 else torch.maximum(likeness, near)
    order = torch.cat(chosen, dim=1).cpu().numpy()
    return Best(np.take_along_axis(best.items, order, 1), np.take_along_axis(best.scores, order, 1))


def best_items(scores: Tensor, count: int) -> Best:
    """The `count` best items of `scores` (B, rows); minus infinity is never among them."""
    short = max(0, count - scores.shape[1])
    values, rows = F.pad(scores, (0, short), value=float("-inf")).topk(count, dim=1)
    rows = torch.where(torch.isfinite(values), rows, 0)
    return Best(rows.cpu().numpy().astype(np.int32), torch.where(rows > 0, values, 0.0).cpu().numpy())
