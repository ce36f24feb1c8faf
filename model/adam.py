"""Adam for a family's few dense weights.

torch.optim.Adam takes two seconds to import (it brings the compiler along) and has to be told on the host whether to
skip a step; this one skips on the device.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from model.state import State

BETAS, EPSILON = (0.9, 0.999), 1e-8


class Adam:
    """Kingma & Ba 2015, algorithm 1, for parameters of any shape."""

    def __init__(self, parameters: Iterable[Tensor], learning_rate: float) -> None:
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        device = self.parameters[0].device if self.parameters else None
        self.steps = torch.zeros((), device=device)
        self.means = [torch.zeros_like(p) for p in self.parameters]
        self.squares = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self, finite: Tensor) -> None:
        """One step along the parameters' gradients; nothing where `finite` () is false."""
        self.steps += finite
        corrections = [1 - beta**self.steps for beta in BETAS]
        for parameter, mean, square in zip(self.parameters, self.means, self.squares, strict=True):
            if parameter.grad is None:
                continue
            gradient = torch.where(finite, parameter.grad, 0.0)
            mean.copy_(torch.where(finite, mean.lerp(gradient, 1 - BETAS[0]), mean))
            square.copy_(torch.where(finite, square.lerp(gradient.square(), 1 - BETAS[1]), square))
            root = (square / corrections[1]).sqrt().add(EPSILON)
            step = self.learning_rate * (mean / corrections[0]) / root
            parameter.sub_(torch.where(finite, step, 0.0))

    def state(self) -> State:
        """Tensors and plain data that `load` takes."""
        moments = {"means": self.means, "squares": self.squares}
        return {"steps": self.steps.cpu().clone()} | {k: [t.cpu().clone() for t in v] for k, v in moments.items()}

    def load(self, state: State) -> None:
        """Go on from `state`."""
        self.steps.copy_(state["steps"])
        for name in ("means", "squares"):
            for ours, saved in zip(getattr(self, name), state[name], strict=True):
                ours.copy_(saved)
