"""Neighbour aggregation: a user is what it clicked last, an item is itself and what was clicked beside it of late."""

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.batch import Int32, PastEvents, TrainingBatch
from model.config import ModelConfig
from model.decay import decayed_means
from model.graph import ItemGraph
from model.history import ClickLog
from model.recommender import Leaves, Recommender
from model.state import State

DECAYS = (0.5, 0.9, 1.0)  # of a click's weight, by click: the last few, the last dozen, all alike
NEIGHBOURS = 16  # newest ones of an item
BEFORE = 2  # clicks of the same user that an item is joined with
SHARE = 0.5  # of the neighbours in an item's vector at first; learned


class NeighbourAggregation(Recommender):
    """user → its last items → their neighbours, LightGCN-like (He et al. 2020): sums and learned mixes, no layers of
    activations.

    around(i) = e(i) + g · Σ over neighbours j of e(j) / √degree(j), these weights made to sum to 1; the neighbours are
    the newest clicks beside i, whoever made them. user = Σ over γ of W_γ · (normalised γ-decayed mean of around() of
    the last clicks), score = user · around(i) + bias. The graph moves at the end of each mini-batch; users are current
    to the event, as everywhere.
    """

    name: ClassVar[str] = "gnn"

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._mix = nn.Parameter((torch.eye(config.dim).repeat(len(DECAYS), 1) / len(DECAYS)).to(device))  # (3 d, d)
        self._nobody = nn.Parameter(torch.zeros(config.dim, device=device))  # (d,)
        self._share = nn.Parameter(torch.tensor(SHARE, device=device))  # ()
        self.dense = nn.ParameterDict({"mix": self._mix, "nobody": self._nobody, "share": self._share})
        ages = torch.arange(config.history)
        self._decays = torch.stack([torch.tensor(g) ** ages for g in DECAYS]).to(device)  # (3, L)
        self.graph = ItemGraph(NEIGHBOURS)
        # The graph on the device: what aggregation of all items needs at once.
        self._near = torch.zeros(1, NEIGHBOURS, dtype=torch.int32, device=device)  # (rows, K)
        self._weight = torch.zeros(1, device=device)  # (rows,): 1 / √degree
        self._around: Tensor | None = None  # (rows, d) of all items; None = must be made anew

    def represent(self, tables: Leaves, users: Tensor, history: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002
        """See the class; (B, d)."""
        means = decayed_means(tables["items"], history, present, self._decays)  # (B, 3 d)
        return means @ self._mix + ~present[:, :1] * self._nobody

    def losses(self, tables: Leaves, batch: TrainingBatch) -> Tensor:
        """One loss a sample (B,)."""
        around = self._aggregate(tables["items"], batch.neighbours, self._weight[batch.item_rows])
        return super().losses(tables | {"items": around}, batch)

    @torch.no_grad()
    def tables(self) -> Leaves:
        """As everywhere, but "items" holds around() of every item."""
        tables = super().tables()
        if self._around is None:  # once a mini-batch, however many vectors are asked for
            self._around = self._aggregate(tables["items"], self._near, self._weight)
        return tables | {"items": self._around}

    def _aggregate(self, items: Tensor, near: Tensor, weight: Tensor) -> Tensor:
        """around() (n, d) of the first n of `items` (m, d), with neighbours `near` (n, K) and weights (m,)."""
        shares = weight[near] * (near > 0)
        shares = shares / shares.sum(1, keepdim=True).clamp_min(1e-9)
        beside = F.embedding_bag(near, items, mode="sum", per_sample_weights=shares.to(items.dtype))  # (n, d)
        return items[: len(near)] + self._share * beside

    def neighbours(self, rows: Int32) -> Int32:
        """The rings (n, K) of item `rows` (n,)."""
        return self.graph.near[rows]

    def observe(self, events: PastEvents, log: ClickLog) -> None:
        """Join the items that were clicked with those that the same user had clicked just before."""
        clicked = events.weights > 0
        users, positions = events.users[clicked], events.positions[clicked]
        self._mirror(self.graph.join(events.items[clicked], log.window(users, positions, BEFORE)))

    def step(self, batch: TrainingBatch, micro_batch_size: int) -> tuple[Tensor, Tensor]:
        """One optimizer step, as everywhere."""
        self._around = None
        return super().step(batch, micro_batch_size)

    def grow(self, user_rows: int, item_rows: int) -> None:
        """Hold at least so many rows."""
        super().grow(user_rows, item_rows)
        if (rows := len(self.item_tables["items"].weight)) > len(self._near):
            self.graph.grow(rows)
            self._mirror_all()

    def reset_items(self, rows: Int32) -> None:
        """Make item rows as good as new, and nobody's neighbours."""
        super().reset_items(rows)
        self.graph.forget(rows)
        self._mirror_all()

    def place_items(self, rows: Tensor, values: Tensor) -> None:
        """Let item rows (n,) that nobody has clicked go on from around `values` (n, item_width)."""
        super().place_items(rows, values)
        self._around = None

    def state(self, user_rows: int, item_rows: int) -> State:
        """Tensors and plain data that `load` takes."""
        return super().state(user_rows, item_rows) | {"graph": self.graph.state(item_rows)}

    def load(self, state: State) -> None:
        """Become the family whose `state` this is."""
        super().load(state)
        self.graph.load(state["graph"])
        self.graph.grow(len(self.item_tables["items"].weight))
        self._mirror_all()

    def _mirror_all(self) -> None:
        rows = len(self.item_tables["items"].weight)
        self._near = torch.zeros(rows, NEIGHBOURS, dtype=torch.int32, device=self.device)
        self._weight = torch.zeros(rows, device=self.device)
        self._mirror(np.arange(rows, dtype=np.int32))

    def _mirror(self, rows: Int32) -> None:
        """Bring `rows` of the graph to the device."""
        where = torch.from_numpy(rows).to(self.device, torch.int64)
        self._near[where] = torch.from_numpy(self.graph.near[rows]).to(self.device)
        degree = torch.from_numpy(self.graph.count[rows]).to(self.device, torch.float32)
        self._weight[where] = (1.0 + degree).rsqrt()
        self._around = None
