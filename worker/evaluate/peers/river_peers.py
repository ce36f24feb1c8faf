"""The `river` library's best recommender, an item at a time."""

from typing import Any

import numpy as np
from river.optim import SGD
from river.optim.initializers import Normal
from river.reco import BiasedMF

from model.batch import Float64, Int32


class RiverBiasedMf:
    """BiasedMF with a target of 1 for each click and of 0 for items drawn among those that have appeared.

    Without the latter it learns nothing from clicks, which all have the same target. Its items are copied to a matrix,
    so that all of them can be ranked at once.
    """

    name = "river_biased_mf"

    def __init__(
        self, items: int, factors: int = 32, rate: float = 0.1, l2: float = 0.01, negatives: int = 5, seed: int = 0
    ) -> None:
        self.settings: dict[str, Any] = {
            "factors": factors, "rate": rate, "l2": l2, "negatives": negatives, "seed": seed,
        }  # fmt: skip
        self._rng, self._negatives, self._appeared = np.random.default_rng(seed), negatives, 0
        self._model = BiasedMF(
            n_factors=factors, bias_optimizer=SGD(rate), latent_optimizer=SGD(rate),
            latent_initializer=Normal(0.0, 0.1, seed), l2_bias=l2, l2_latent=l2, seed=seed,
        )  # fmt: skip
        self._latents, self._biases = np.zeros((items, factors)), np.zeros(items)

    def score(self, user: int, clicked: Int32, scores: Float64) -> None:  # noqa: ARG002
        """Dot products and the items' biases; what is the same for all items changes no rank."""
        scores[:] = self._biases[: len(scores)]
        if user in self._model.u_latents:
            scores += self._latents[: len(scores)] @ self._model.u_latents[user]

    def learn(self, user: int, clicked: Int32, item: int) -> None:  # noqa: ARG002
        """One step for each negative, then one for the click."""
        self._appeared = max(self._appeared, item + 1)
        for negative in self._rng.integers(0, self._appeared, self._negatives).tolist():
            if negative != item:
                self._step(user, negative, 0.0)
        self._step(user, item, 1.0)

    def _step(self, user: int, item: int, target: float) -> None:
        self._model.learn_one(user, item, target)  # type: ignore[no-untyped-call]
        self._latents[item], self._biases[item] = self._model.i_latents[item], self._model.i_biases[item]
