"""Repeated event ids inside a bounded window."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class DedupWindow:
    """Remembers at least the newest `size` event ids, at most twice as many: two generations, the older of which is
    dropped when the younger is full. That costs a set look-up an event, with nothing to reorder.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._young: dict[str, None] = {}
        self._old: dict[str, None] = {}

    def first_seen(self, event_ids: Sequence[str | None]) -> npt.NDArray[np.bool_]:
        """True (n,) for each id that the window does not hold yet; remembers them. None is never a repetition."""
        return np.fromiter((self._is_new(event_id) for event_id in event_ids), np.bool_, len(event_ids))

    def _is_new(self, event_id: str | None) -> bool:
        if event_id is None or self.size == 0:
            return True
        if event_id in self._young or event_id in self._old:
            return False
        self._young[event_id] = None
        if len(self._young) >= self.size:
            self._young, self._old = {}, self._young
        return True

    def state(self) -> dict[str, Any]:
        """Plain data that `load` takes."""
        return {"young": list(self._young), "old": list(self._old)}

    def load(self, state: dict[str, Any]) -> None:
        """Become the window whose `state` this is."""
        self._young, self._old = dict.fromkeys(state["young"]), dict.fromkeys(state["old"])
