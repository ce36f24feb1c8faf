"""How far predictions are from ratings."""

import numpy as np

from model.batch import Float32


def rmse(predicted: Float32, actual: Float32) -> float:
    """Root of the mean squared error; both (n,)."""
    return float(np.sqrt(np.mean(np.square(predicted.astype(np.float64) - actual))))


def mae(predicted: Float32, actual: Float32) -> float:
    """Mean absolute error; both (n,)."""
    return float(np.mean(np.abs(predicted.astype(np.float64) - actual)))
