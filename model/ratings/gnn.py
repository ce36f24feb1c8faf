"""Graph convolution over the rating graph, in the manner of GC-MC (van den Berg, Kipf & Welling 2017)."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.ratings.base import Hyperparameters, RatingModel, TrainingSet

MAX_LEVELS = 20  # ratings with more distinct values are rounded to so many of them
_SIDE_WIDTH = 16


class GraphConvolution(RatingModel):
    """A user is the sum of the items it rated, an item of its users, with an embedding for each level of rating;
    a bilinear form a level scores the pair, and the prediction is the mean of the levels under their softmax.

    A rating that is being predicted sends no message: were it to, training would learn to read the answer off the
    graph, and a test rating is not in the graph either. Embeddings of levels are cumulative, so 4 stars share most
    with 3 and 5.
    """

    name: ClassVar[str] = "gnn"
    label: ClassVar[str] = "GNN, GC-MC-like"
    candidates: ClassVar[tuple[Hyperparameters, ...]] = (
        Hyperparameters(dim=64, learning_rate=0.01, batch_size=7200, dropout=0.3, averaging=0.95, starts=3, patience=6),
    )

    def __init__(self, train: TrainingSet, settings: Hyperparameters) -> None:
        super().__init__(train, settings)
        dim, out, device = settings.dim, settings.dim // 2, train.device
        self.levels = _levels(train.values)  # (L,)
        self.level_of = (train.values[:, None] - self.levels).abs().argmin(1)  # (n,)
        n_levels = len(self.levels)
        self.to_users = _Messages(train.users, train.items, self.level_of, (train.n_users, train.n_items))
        self.to_items = _Messages(train.items, train.users, self.level_of, (train.n_items, train.n_users))
        self.user_rows = nn.Parameter(0.1 * torch.randn(n_levels, train.n_users, dim, device=device) / n_levels**0.5)
        self.item_rows = nn.Parameter(0.1 * torch.randn(n_levels, train.n_items, dim, device=device) / n_levels**0.5)
        self.user_layer = nn.Linear(dim + self._side_width(train.user_side), out, device=device)
        self.item_layer = nn.Linear(dim + self._side_width(train.item_side), out, device=device)
        steps = torch.arange(n_levels, device=device) - (n_levels - 1) / 2
        noise = 0.02 * torch.randn(n_levels, out, out, device=device)
        self.forms = nn.Parameter(0.1 * steps[:, None, None] * torch.eye(out, device=device) + noise)  # (L, d', d')
        self.user_levels = nn.Parameter(torch.zeros(train.n_users, n_levels, device=device))
        self.item_levels = nn.Parameter(torch.zeros(train.n_items, n_levels, device=device))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """See the class; every rating of the training set sends its message; (n,)."""
        everything = torch.ones(len(self.train_set), device=self.train_set.device)
        return self._expected(self._logits(users, items, everything))

    def loss(self, rows: Tensor) -> Tensor:
        """Cross-entropy of the levels of ratings `rows` (n,), which send no messages meanwhile; ()."""
        users, items = self.train_set.users[rows], self.train_set.items[rows]
        others = torch.ones(len(self.train_set), device=self.train_set.device)
        others[rows] = 0.0
        logits = self._logits(users, items, others)
        return F.cross_entropy(logits, self.level_of[rows]) + self.penalty(users, items)

    def penalty(self, users: Tensor, items: Tensor) -> Tensor:
        """Of the biases by level; ()."""
        squares = self.user_levels[users].square().sum(1) + self.item_levels[items].square().sum(1)
        return self.settings.l2 * squares.mean()

    def _expected(self, logits: Tensor) -> Tensor:
        return logits.softmax(1) @ self.levels

    def _logits(self, users: Tensor, items: Tensor, present: Tensor) -> Tensor:
        """Logits (n, L); `present` (ratings of the training set,) is 1 where a rating sends its message, else 0."""
        user_states, item_states = self._states(present)
        formed = torch.einsum("ud,lde->ule", user_states, self.forms)  # (U, L, d')
        pairs = (formed[users] * item_states[items][:, None]).sum(2)
        return pairs + self.user_levels[users] + self.item_levels[items]

    def _states(self, present: Tensor) -> tuple[Tensor, Tensor]:
        users, items = self.train_set.users, self.train_set.items
        n_users, n_items = self.train_set.n_users, self.train_set.n_items
        degrees = _sums(users, present, n_users)[users] * _sums(items, present, n_items)[items]
        weights = present * degrees.clamp(min=1).rsqrt()
        from_items = weights * self._kept(n_items)[items]
        from_users = weights * self._kept(n_users)[users]
        to_users = self.to_users.sums(from_items, self.item_rows.cumsum(0))
        to_items = self.to_items.sums(from_users, self.user_rows.cumsum(0))
        user_states = self.user_layer(torch.cat([self._hidden(to_users), *self._user_side()], dim=1))
        item_states = self.item_layer(torch.cat([self._hidden(to_items), *self._item_side()], dim=1))
        return user_states, item_states

    def _kept(self, nodes: int) -> Tensor:
        """Node dropout: all messages of a node, or none (n,)."""
        return F.dropout(torch.ones(nodes, device=self.train_set.device), self.settings.dropout, self.training)

    def _hidden(self, sums: Tensor) -> Tensor:
        return F.dropout(F.relu(sums), self.settings.dropout, self.training)

    def _side_width(self, side: Tensor) -> int:  # noqa: ARG002
        return 0

    def _user_side(self) -> list[Tensor]:
        return []

    def _item_side(self) -> list[Tensor]:
        return []


class GraphConvolutionWithSide(GraphConvolution):
    """The same with what is known of users and items, through a small layer of its own."""

    name: ClassVar[str] = "gnn_side"
    label: ClassVar[str] = "GNN with side information"
    uses_side: ClassVar[bool] = True

    def __init__(self, train: TrainingSet, settings: Hyperparameters) -> None:
        super().__init__(train, settings)
        self.user_encoder = nn.Linear(train.user_side.shape[1], _SIDE_WIDTH, device=train.device)
        self.item_encoder = nn.Linear(train.item_side.shape[1], _SIDE_WIDTH, device=train.device)

    def _side_width(self, side: Tensor) -> int:  # noqa: ARG002
        return _SIDE_WIDTH

    def _user_side(self) -> list[Tensor]:
        return [F.relu(self.user_encoder(self.train_set.user_side))]

    def _item_side(self) -> list[Tensor]:
        return [F.relu(self.item_encoder(self.train_set.item_side))]


def _levels(values: Tensor) -> Tensor:
    """The distinct ratings (L,), ascending; quantiles of them where there are too many."""
    distinct: Tensor = torch.unique(values)
    if len(distinct) > MAX_LEVELS:
        distinct = torch.unique(values.quantile(torch.linspace(0, 1, MAX_LEVELS, device=values.device)))
    return distinct


def _sums(rows: Tensor, values: Tensor, size: int) -> Tensor:
    return torch.zeros(size, device=values.device).index_add_(0, rows, values)


class _Messages:
    """Weighted sums over a node's ratings: a product with a sparse matrix (targets, levels · sources).

    Its transpose is kept in rows as well, for the gradient: ten times as fast as scattering.
    """

    def __init__(self, targets: Tensor, sources: Tensor, levels: Tensor, size: tuple[int, int]) -> None:
        columns = levels * size[1] + sources
        width = size[1] * (int(levels.max()) + 1)
        self._forward = _Pattern(targets, columns, (size[0], width))
        self._transposed = _Pattern(columns, targets, (width, size[0]))

    def sums(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Sums (targets, d) of `rows` (levels, sources, d) over ratings weighted by `weights` (ratings,)."""
        flat = rows.flatten(0, 1)
        sums: Tensor = _SparseProduct.apply(self._forward, self._transposed, weights, flat)  # type: ignore[no-untyped-call]
        return sums


class _Pattern:
    """Where a sparse matrix has its entries, row after row."""

    def __init__(self, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> None:
        self._order = (rows * shape[1] + columns).argsort()
        self._columns = columns[self._order]
        self._starts = F.pad(torch.bincount(rows, minlength=shape[0]).cumsum(0), (1, 0))[:-1]

    def times(self, entries: Tensor, dense: Tensor) -> Tensor:
        """The matrix with `entries`, in the order they were given in, times `dense` (columns, d)."""
        weights = entries[self._order]
        return F.embedding_bag(self._columns, dense, self._starts, mode="sum", per_sample_weights=weights)


class _SparseProduct(torch.autograd.Function):
    """A sparse matrix times a dense one, with a gradient for the dense one only."""

    @staticmethod
    def forward(ctx: Any, matrix: _Pattern, transposed: _Pattern, entries: Tensor, dense: Tensor) -> Tensor:
        ctx.transposed, ctx.entries = transposed, entries
        return matrix.times(entries, dense)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, ctx.transposed.times(ctx.entries, gradients[0].contiguous())
