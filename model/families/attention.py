"""Self-attention over the last clicks: what a user did is weighed by what it did last."""

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.recommender import Leaves, Recommender
from model.sampling import generator

DECAYS = (0.5, 0.9, 1.0)  # of a click's weight, by click, in each head at first
LENGTH = 20  # newest clicks that are attended to
NEVER = -1e9  # a score before softmax that is no more than rounding


class SelfAttention(Recommender):
    """One causal self-attention layer and its feed-forward part in the manner of SASRec (Kang & McAuley 2018), then a
    head for each decay that pools the clicks' own item rows by how they fit the newest one and how recent they are.

    x_k = item row of the k-th newest click; y = x + learned position; y += attention(norm y) over click k and older
    ones; y += feed-forward(norm y). Head γ weighs click k by softmax over k of (Q_γ norm y_0) · (K norm y_k) / √d +
    r_γ(k), with r learned from log γ^k on; user = Σ over γ of W_γ · Σ over k of weight · x_k. History and output share
    one item table. All that is not a decay starts at or near zero, so the first users get a two-tower's vectors: an
    online model has no time to find out about recency.
    """

    name: ClassVar[str] = "attention"

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__(config, device)
        d, self._length = config.dim, min(LENGTH, config.history)
        rng = generator(config.seed, "attention", 0)
        shapes = {"query": (d, d), "key": (d, d), "value": (d, d), "up": (d, 2 * d), "fit": (d, d)}
        drawn = {n: rng.standard_normal(shape, dtype=np.float32) * np.float32(d**-0.5) for n, shape in shapes.items()}
        ages = torch.arange(self._length)
        given = {
            "position": torch.zeros(self._length, d),
            "out": torch.zeros(d, d),
            "down": torch.zeros(2 * d, d),
            "scale": torch.ones(2, d),  # of the two norms
            "ask": torch.zeros(d, len(DECAYS) * d),
            "recency": torch.stack([np.log(g) * ages for g in DECAYS]).float(),  # (3, L)
            "mix": torch.eye(d).repeat(len(DECAYS), 1) / len(DECAYS),  # (3 d, d)
            "nobody": torch.zeros(d),
        }
        weights = {name: torch.from_numpy(array) for name, array in drawn.items()} | given
        self._dense = nn.ParameterDict({name: nn.Parameter(weight.to(device)) for name, weight in weights.items()})
        self.dense = self._dense

    def represent(self, tables: Leaves, users: Tensor, history: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002
        """See the class; (B, d)."""
        history, present = history[:, : self._length], present[:, : self._length]
        clicks = F.embedding(history, tables["items"])  # (B, L, d)
        weights = self._pooling(self._contextual(clicks, present), present)  # (B, 3, L)
        pooled = (weights @ clicks).flatten(1)  # (B, 3 d)
        return torch.where(present[:, :1], pooled @ self._dense["mix"], self._dense["nobody"])

    def _contextual(self, clicks: Tensor, present: Tensor) -> Tensor:
        """The clicks (B, L, d), newest first, after they have seen themselves and what came before them."""
        dense, (_, length, d) = self._dense, clicks.shape
        causal = torch.ones(length, length, dtype=torch.bool, device=clicks.device).triu()
        visible = (causal & present.unsqueeze(1)) | torch.eye(length, dtype=torch.bool, device=clicks.device)
        y = clicks + dense["position"][:length]
        normed = F.layer_norm(y, (d,), dense["scale"][0])
        fit = (normed @ dense["query"]) @ (normed @ dense["key"]).transpose(1, 2) * d**-0.5  # (B, L, L)
        y = y + fit.masked_fill(~visible, NEVER).softmax(2) @ (normed @ dense["value"]) @ dense["out"]
        normed = F.layer_norm(y, (d,), dense["scale"][1])
        contextual: Tensor = y + F.relu(normed @ dense["up"]) @ dense["down"]
        return contextual

    def _pooling(self, contextual: Tensor, present: Tensor) -> Tensor:
        """Weights (B, 3, L) of the clicks in each head; they sum to 1 where there are clicks."""
        dense, (count, length, d) = self._dense, contextual.shape
        normed = F.layer_norm(contextual, (d,))
        asked = (normed[:, 0] @ dense["ask"]).view(count, len(DECAYS), d)
        fit = asked @ (normed @ dense["fit"]).transpose(1, 2) * d**-0.5 + dense["recency"][:, :length]
        weights: Tensor = fit.masked_fill(~present.unsqueeze(1), NEVER).softmax(2)
        return weights
