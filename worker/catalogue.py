"""What the items topic says of the items: titles, attributes and whether they can be had; bounded."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from model.batch import Int32
from model.features import PER_ITEM, feature_hashes
from worker.items import Description

_UNKNOWN = Description()


class Columns(NamedTuple):
    """Of n items; all empty while nothing was ever described."""

    titles: list[str]
    attributes: list[bytes]  # JSON objects
    available: list[bool]


class Catalogue:
    """Descriptions by item id. Past the capacity the least recently described ones go, and are counted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evicted = 0  # over the model's whole life
        self.unavailable: set[str] = set()
        self._descriptions: dict[str, Description] = {}  # least recently described first
        self._used = False

    def __len__(self) -> int:
        return len(self._descriptions)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._descriptions

    def get(self, item_id: str) -> Description:
        """What is known of an item; of one that nobody described: no title, no attributes, available."""
        return self._descriptions.get(item_id, _UNKNOWN)

    def take(self, changes: Iterable[tuple[str, Description | None]]) -> list[str]:
        """Note `changes`, in order. Returns each id, once, of which something else is known now than before."""
        before: dict[str, Description] = {}
        for item_id, description in changes:
            before.setdefault(item_id, self.get(item_id))
            self._descriptions.pop(item_id, None)
            self.unavailable.discard(item_id)
            if description is not None:
                self._describe(item_id, description)
        for item_id, description in self._overflow():
            before.setdefault(item_id, description)
        return [item_id for item_id, was in before.items() if was != self.get(item_id)]

    def _describe(self, item_id: str, description: Description) -> None:
        self._used = True
        self._descriptions[item_id] = description
        if not description.available:
            self.unavailable.add(item_id)

    def _overflow(self) -> list[tuple[str, Description]]:
        """Takes out what is too much."""
        gone = []
        while len(self._descriptions) > self.capacity:
            item_id = next(iter(self._descriptions))
            gone.append((item_id, self._descriptions.pop(item_id)))
            self.unavailable.discard(item_id)
            self.evicted += 1
        return gone

    def features(self, ids: Sequence[str]) -> Int32:
        """The features (n, PER_ITEM) of `ids` (n,), for the model."""
        found = [self.get(item_id) for item_id in ids]
        hashes = [feature_hashes(title, json.loads(attributes)) for title, attributes, _ in found]
        return np.stack(hashes) if hashes else np.empty((0, PER_ITEM), np.int32)

    def columns(self, ids: Sequence[str]) -> Columns:
        """What is published of `ids` (n,)."""
        if not self._used:
            return Columns([], [], [])
        found = [self.get(item_id) for item_id in ids]
        return Columns([d.title for d in found], [d.attributes for d in found], [d.available for d in found])

    def state(self) -> dict[str, Any]:
        """Plain data that `load` takes."""
        found = list(self._descriptions.values())
        return {
            "ids": list(self._descriptions),
            "titles": [description.title for description in found],
            "attributes": [description.attributes for description in found],
            "unavailable": list(self.unavailable),
            "evicted": self.evicted,
            "used": self._used,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the catalogue whose `state` this is; a smaller capacity keeps the newest descriptions."""
        self.unavailable = set(state["unavailable"])
        self.evicted, self._used = state["evicted"], state["used"]
        self._descriptions = {
            item_id: Description(title, attributes, item_id not in self.unavailable)
            for item_id, title, attributes in zip(state["ids"], state["titles"], state["attributes"], strict=True)
        }
        self._overflow()
