"""Which events of a data set are sent, and their ids."""

from itertools import islice

import numpy as np

from replay.datasets.base import Interaction, Table
from replay.stream import Selection


def table(n: int = 6, values: list[float] | None = None) -> Table:
    numbers = np.arange(n)
    return Table("t", numbers, numbers * 10, numbers * 1000, np.array(values) if values else None)


def test_events_are_numbered_and_named_by_their_place_in_the_data_set() -> None:
    events = list(Selection().events(table(2)))
    assert events == [
        (0, Interaction("0", "0", 0, event_id="t-0")),
        (1, Interaction("1", "10", 1000, event_id="t-1")),
    ]


def test_an_event_has_the_same_id_whatever_else_is_chosen() -> None:
    values = [1.0, 5.0, 2.0, 4.0, 3.0, 5.0]
    everything = dict(Selection().events(table(6, values)))
    for selection in (Selection(start=3), Selection(min_value=4), Selection(2, 2, 3.0)):
        for number, event in selection.events(table(6, values)):
            assert everything[number] == event


def test_start_limit_and_lowest_value_choose() -> None:
    values = [1.0, 5.0, float("nan"), 4.0, 3.0, 5.0]
    chosen = Selection(start=1, limit=2, min_value=4).events(table(6, values))
    assert [number for number, _ in chosen] == [1, 3]


def test_ids_of_the_data_set_go_first() -> None:
    numbers = np.arange(2)
    named = Table("t", numbers, numbers, None, event_ids=np.array(["a", "b"], object))
    assert [event.event_id for _, event in Selection().events(named)] == ["a", "b"]


def test_a_loop_begins_again_at_the_start_with_other_ids() -> None:
    events = list(islice(Selection(start=4, loop=True).events(table(6)), 5))
    assert [event.event_id for _, event in events] == ["t-0-4", "t-0-5", "t-1-4", "t-1-5", "t-2-4"]


def test_a_loop_that_chooses_nothing_ends() -> None:
    assert list(Selection(start=99, loop=True).events(table())) == []


def test_totals() -> None:
    assert Selection(start=2).total(table()) == 4
    assert Selection(start=2, limit=3).total(table()) == 3
    assert Selection(start=99).total(table()) == 0
    assert Selection(loop=True).total(table()) is None
    assert Selection(loop=True, limit=50).total(table()) == 50
