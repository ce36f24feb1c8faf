"""What every model family is: tables of embeddings, dense weights, and two vectors whose dot product is the score."""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.adam import Adam
from model.batch import Int32, PastEvents, TrainingBatch
from model.config import ModelConfig
from model.history import ClickLog
from model.losses import sampled_softmax, weighted
from model.state import State
from model.tables import EmbeddingTable

Leaves = dict[str, Tensor]


class Recommender(ABC):
    """A family: how a user's vector is made. Items are rows of the table "items" with a bias each.

    Published vectors are [user, 1] and [item, bias], so their dot product is the whole score.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True  # the dot product of the published vectors is the family's score
    from_history: ClassVar[bool] = True  # a user's vector is a function of its history alone

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.item_tables = {
            "items": self._table("items", config.dim, config.init_std),
            "bias": self._table("bias", 1, 0.0),
        }
        self.user_tables: dict[str, EmbeddingTable] = {}
        self.dense: nn.Module = nn.Module()
        self._adam: Adam | None = None

    @property
    def dim(self) -> int:
        """Width of the published vectors."""
        return self.config.dim + 1

    @abstractmethod
    def represent(self, tables: Leaves, users: Tensor, history: Tensor, present: Tensor) -> Tensor:
        """What stands for the users (B, d): from rows `users` (B,) and `history` (B, L) into `tables`."""

    def score(self, tables: Leaves, users: Tensor, items: Tensor) -> Tensor:
        """Scores (B, n) of item rows `items` (n,) for represented `users` (B, d)."""
        return torch.addmm(tables["bias"][items, 0], users, tables["items"][items].T)

    def score_pairs(self, tables: Leaves, users: Tensor, items: Tensor) -> Tensor:
        """Scores (B,) of one item row each, `items` (B,), for represented `users` (B, d)."""
        return (users * tables["items"][items]).sum(1) + tables["bias"][items, 0]

    @torch.no_grad()
    def full_scores(self, users: Tensor, history: Tensor, item_rows: int) -> Tensor:
        """Scores (B, item_rows) of all items for user rows (B,) with histories (B, L); if exact, what is published."""
        tables = self.tables()
        represented = self.represent(tables, users, history, history > 0).float()
        return torch.addmm(tables["bias"][:item_rows, 0], represented, tables["items"][:item_rows].T)

    def observe(self, events: PastEvents, log: ClickLog) -> None:  # noqa: B027
        """See the events of a mini-batch, in order, after they were learned; most families need not."""

    def neighbours(self, rows: Int32) -> Int32:
        """Item rows (n, K) that the vectors of item `rows` (n,) are made of too, 0 = none; K = 0 for most families."""
        return np.empty((len(rows), 0), np.int32)

    def grow(self, user_rows: int, item_rows: int) -> None:
        """Hold at least so many rows."""
        for table in self.user_tables.values():
            table.grow(user_rows)
        for table in self.item_tables.values():
            table.grow(item_rows)

    def reset_users(self, rows: Int32) -> None:
        """Make user rows as good as new."""
        for table in self.user_tables.values():
            table.reset(rows)

    @property
    def item_width(self) -> int:
        """Numbers that are learned of one item."""
        return sum(table.width for table in self.item_tables.values())

    def item_parameters(self, rows: Tensor) -> Tensor:
        """What is learned of item rows (n,): (n, item_width)."""
        return torch.cat([rows.new_empty((len(rows), 0), dtype=torch.float32), *self._item_columns(rows)], dim=1)

    def place_items(self, rows: Tensor, values: Tensor) -> None:
        """Let item rows (n,) that nobody has clicked go on from around `values` (n, item_width)."""
        start = 0
        for table in self.item_tables.values():
            table.weight[rows] = values[:, start : start + table.width] + table.spread(rows)
            start += table.width

    def _item_columns(self, rows: Tensor) -> list[Tensor]:
        return [table.weight[rows] for table in self.item_tables.values()]

    def reset_items(self, rows: Int32) -> None:
        """Make item rows as good as new."""
        for table in self.item_tables.values():
            table.reset(rows)

    @torch.no_grad()
    def user_vectors(self, users: Tensor, history: Tensor) -> Tensor:
        """Vectors (B, dim) of user rows (B,) with histories (B, L) of item rows, 0 = none."""
        return self.user_layout(self.represent(self.tables(), users, history, history > 0).float())

    def user_layout(self, users: Tensor) -> Tensor:
        """What is published (B, dim) of represented `users` (B, d)."""
        return F.pad(users, (0, 1), value=1.0)

    @torch.no_grad()
    def item_vectors(self, rows: slice | Tensor) -> Tensor:
        """Vectors (n, dim) of item rows."""
        tables = self.tables()
        return torch.cat([tables["items"][rows], tables["bias"][rows]], dim=1)

    def losses(self, tables: Leaves, batch: TrainingBatch) -> Tensor:
        """One loss a sample (B,)."""
        users = self.represent(tables, batch.users, batch.history, batch.present)
        positive = self.score_pairs(tables, users, batch.positives)
        negative = self.score(tables, users, batch.negatives)
        losses = sampled_softmax(positive, negative, batch.positive_log_q, batch.negative_log_q, batch.blocked)
        return weighted(losses, positive, batch.weights)

    def step(self, batch: TrainingBatch, micro_batch_size: int) -> tuple[Tensor, Tensor]:
        """One optimizer step, accumulated over micro-batches; returns (loss (), finite ()), both on the device.

        A step whose loss or gradient is not finite changes nothing. Raises torch.OutOfMemoryError before anything
        has changed, so that the caller can try again with smaller micro-batches and get the same gradient.
        """
        leaves = self._leaves(batch)
        parameters = [*leaves.values(), *self.dense.parameters()]
        for parameter in parameters:
            parameter.grad = None
        loss = torch.zeros((), device=self.device)
        for start in range(0, len(batch), micro_batch_size):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                part = self.losses(leaves, batch.part(start, start + micro_batch_size)).sum() / len(batch)
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        finite = torch.isfinite(loss)
        for parameter in parameters:
            if parameter.grad is not None:
                # The sum of the squares: they go into the optimizer's state, which must stay finite too.
                finite = finite & torch.isfinite(parameter.grad.square().sum())
        self._apply(batch, leaves, finite)
        return loss, finite

    def state(self, user_rows: int, item_rows: int) -> State:
        """Tensors and plain data that `load` takes."""
        return {
            "users": {name: table.state(user_rows) for name, table in self.user_tables.items()},
            "items": {name: table.state(item_rows) for name, table in self.item_tables.items()},
            "dense": {k: v.detach().cpu().clone() for k, v in self.dense.state_dict().items()},
            "adam": self._optimizer().state(),
        }

    def load(self, state: State) -> None:
        """Become the family whose `state` this is."""
        for name, table in self.user_tables.items():
            table.load(state["users"][name])
        for name, table in self.item_tables.items():
            table.load(state["items"][name])
        self.dense.load_state_dict(state["dense"])
        self._optimizer().load(state["adam"])

    def _table(self, name: str, width: int, init_std: float) -> EmbeddingTable:
        return EmbeddingTable(name, width, init_std, self.config.learning_rate, self.config.seed, self.device)

    def tables(self) -> Leaves:
        """The newest values of everything that `represent` and `score` look up, by row."""
        return {name: table.weight for name, table in (self.user_tables | self.item_tables).items()}

    def _leaves(self, batch: TrainingBatch) -> Leaves:
        users = {name: table.gather(batch.user_rows) for name, table in self.user_tables.items()}
        return users | {name: table.gather(batch.item_rows) for name, table in self.item_tables.items()}

    @torch.no_grad()
    def _apply(self, batch: TrainingBatch, leaves: Leaves, finite: Tensor) -> None:
        for tables, rows in ((self.user_tables, batch.user_rows), (self.item_tables, batch.item_rows)):
            for name, table in tables.items():
                if (gradient := leaves[name].grad) is not None:
                    table.apply(rows, gradient, finite)
        self._optimizer().step(finite)

    def _optimizer(self) -> Adam:
        if self._adam is None:  # the family's own constructor has made the weights by now
            self._adam = Adam(self.dense.parameters(), self.config.dense_learning_rate)
        return self._adam
