"""Interactions that can be replayed, each data set in the order of its events."""

from replay.datasets.base import Dataset, DatasetError, Interaction, Item

__all__ = ["Dataset", "DatasetError", "Interaction", "Item"]
