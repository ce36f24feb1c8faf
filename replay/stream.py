"""Which events of a data set are sent, and under which ids."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

from replay.datasets.base import Dataset, Interaction


@dataclass(frozen=True)
class Selection:
    """A part of a data set, in its order."""

    start: int = 0  # number of the first interaction
    limit: int | None = None  # most events in all
    min_value: float | None = None  # interactions with a lower value, or none, are left out
    loop: bool = False  # begin again at the end, for ever

    def events(self, dataset: Dataset) -> Iterator[tuple[int, Interaction]]:
        """Each chosen interaction with its number in the data set and an event id that never changes.

        The id is `<name>-<number>`, with the round between them when looping: sending again from somewhere
        repeats ids, so that what had arrived already counts once.
        """
        return islice(self._rounds(dataset), self.limit)

    def _rounds(self, dataset: Dataset) -> Iterator[tuple[int, Interaction]]:
        if not self.loop:
            yield from self._one_round(dataset, dataset.name)
            return
        for turn in count():
            events = self._one_round(dataset, f"{dataset.name}-{turn}")
            first = next(events, None)
            if first is None:
                return  # nothing is chosen, in this round or any other
            yield first
            yield from events

    def _one_round(self, dataset: Dataset, prefix: str) -> Iterator[tuple[int, Interaction]]:
        lowest = self.min_value
        for number, event in enumerate(dataset.interactions(self.start), self.start):
            if lowest is not None and (event.value is None or event.value < lowest):
                continue
            yield number, event._replace(event_id=event.event_id or f"{prefix}-{number}")

    def total(self, dataset: Dataset) -> int | None:
        """How many events there will be at most; None for no end."""
        if self.loop:
            return self.limit
        rest = max(0, len(dataset) - self.start)
        return rest if self.limit is None else min(rest, self.limit)
