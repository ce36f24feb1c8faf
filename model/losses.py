"""Losses of a mini-batch. All return one value a sample."""

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
    logits = torch.cat([(positive - positive_log_q).unsqueeze(1), negative - negative_log_q], dim=1)
    logits = logits.float()
    mask = F.pad(blocked, (1, 0), value=False)
    return torch.logsumexp(logits.masked_fill(mask, float("-inf")), dim=1) - logits[:, 0]


def weighted(losses: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
    """Losses (B,) by the weights (B,) of their events; one below 0 pushes the score (B,) itself down.

    A negative multiple of a cross-entropy has no lower bound, so a negative example takes the logistic loss.
    """
    return torch.where(weights >= 0, weights * losses, -weights * F.softplus(scores.float()))
