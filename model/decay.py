"""Decayed means of the newest clicks: what a user's vector is made of."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model.batch import Float32, Int32
from model.kernels import kernel


def decayed_means(table: Tensor, history: Tensor, present: Tensor, decays: Tensor) -> Tensor:
    """For each decay γ the mean of a history's rows with weights γ^age that sum to 1 (B, G · d).

    table (U, d). history (B, L): rows of the table, newest first. present (B, L): True for those that count, which
    come first. decays (G, L): γ^age. A history without items has the mean 0.
    """
    if torch.compiler.is_compiling():  # it is being exported: neither kernels nor bags have a form there
        return decayed_means_by_gather(table, history, present, decays)
    if table.device.type == "cpu" and table.dtype == torch.float32:
        means: Tensor = _OnCpu.apply(table, history, present, decays)  # type: ignore[no-untyped-call]
        return means
    return decayed_means_by_bags(table, history, present, decays)


def decayed_means_by_bags(table: Tensor, history: Tensor, present: Tensor, decays: Tensor) -> Tensor:
    """The same in torch's own operations, for every device; the reference for the kernels below."""
    weights = present.unsqueeze(0) * decays[:, None, : history.shape[1]]  # (G, B, L)
    weights = weights / weights.sum(2, keepdim=True).clamp_min(1e-9)
    means = F.embedding_bag(
        history.repeat(len(decays), 1),
        table,
        mode="sum",
        per_sample_weights=weights.flatten(0, 1).to(table.dtype),
    )  # (G B, d)
    return means.view(len(decays), len(history), -1).transpose(0, 1).flatten(1)


def decayed_means_by_gather(table: Tensor, history: Tensor, present: Tensor, decays: Tensor) -> Tensor:
    """The same as one product of matrices, at the price of (B, L, d) of memory."""
    weights = present.unsqueeze(1) * decays[:, : history.shape[1]]  # (B, G, L)
    weights = weights / weights.sum(2, keepdim=True).clamp_min(1e-9)
    return (weights.to(table.dtype) @ table[history]).flatten(1)


class _OnCpu(torch.autograd.Function):
    """One pass over the rows for all decays, forwards and backwards; five times faster than bags of rows."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, history: Tensor, present: Tensor, decays: Tensor) -> Tensor:
        arrays = (history.numpy(), present.sum(1, dtype=torch.int32).numpy(), decays.numpy())
        means = np.zeros((len(history), len(decays), table.shape[1]), np.float32)
        _add_means(table.detach().numpy(), *arrays, means)
        ctx.arrays, ctx.shape = arrays, table.shape
        return torch.from_numpy(means).flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        table_gradient = np.zeros(ctx.shape, np.float32)
        history, lengths, decays = ctx.arrays
        by_decay = gradients[0].contiguous().view(len(history), len(decays), -1)
        _spread_gradient(by_decay.numpy(), history, lengths, decays, table_gradient)
        return torch.from_numpy(table_gradient), None, None, None


@kernel(fastmath=True)
def _add_means(table: Float32, history: Int32, lengths: Int32, decays: Float32, means: Float32) -> None:
    for b in range(history.shape[0]):
        for g in range(decays.shape[0]):
            total = np.float32(0.0)
            for k in range(lengths[b]):
                total += decays[g, k]
            for k in range(lengths[b]):
                weight = decays[g, k] / total
                row = history[b, k]
                for j in range(table.shape[1]):
                    means[b, g, j] += weight * table[row, j]


@kernel(fastmath=True)
def _spread_gradient(by_decay: Float32, history: Int32, lengths: Int32, decays: Float32, gradient: Float32) -> None:
    for b in range(history.shape[0]):
        for g in range(decays.shape[0]):
            total = np.float32(0.0)
            for k in range(lengths[b]):
                total += decays[g, k]
            for k in range(lengths[b]):
                weight = decays[g, k] / total
                row = history[b, k]
                for j in range(gradient.shape[1]):
                    gradient[row, j] += weight * by_decay[b, g, j]
