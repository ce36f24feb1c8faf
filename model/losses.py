"""Losses of a mini-batch. All return one value a sample."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def sampled_softmax(
    positive: Tensor, negative: Tensor, positive_log_q: Tensor, negative_log_q: Tensor, blocked: Tensor
) -> Tensor:
    """Cross-entropy of the positive among sampled negatives, logQ-corrected (B,).

    positive (B,), negative (B, K): scores. positive_log_q (B,), negative_log_q (K,): log of how often each is
    expected among the draws (Bengio & Senécal 2008; as in TensorFlow's sampled_softmax_loss). blocked (B, K):
    negatives that are none.
    """
    losses: Tensor = _SoftmaxOfFirst.apply(  # type: ignore[no-untyped-call]
        (positive - positive_log_q).float(), (negative - negative_log_q).float(), blocked
    )
    return losses


class _SoftmaxOfFirst(torch.autograd.Function):
    """−log softmax of the first among itself and the others that are not blocked.

    Forward and backward share one exponential, where torch's own operations would pass over (B, K) a dozen times.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, others: Tensor, blocked: Tensor) -> Tensor:
        others = others.masked_fill(blocked, float("-inf"))
        largest = torch.maximum(first, others.amax(1))
        own = (first - largest).exp_()
        shares = others.sub_(largest.unsqueeze(1)).exp_()
        total = shares.sum(1) + own
        ctx.save_for_backward(own / total, shares.div_(total.unsqueeze(1)))
        return total.log() + largest - first

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        own, shares = ctx.saved_tensors
        return (own - 1) * gradients[0], shares * gradients[0].unsqueeze(1), None


def weighted(losses: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
    """Losses (B,) by the weights (B,) of their events; one below 0 pushes the score (B,) itself down.

    A negative multiple of a cross-entropy has no lower bound, so a negative example takes the logistic loss.
    """
    return torch.where(weights >= 0, weights * losses, -weights * F.softplus(scores.float()))
