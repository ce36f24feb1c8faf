"""Ids and rows."""

import numpy as np
import pytest

from model.id_table import IdTable
from tests.streams import differences

ODD = ["-1", str(2**63 - 1), str(2**64), "用户", "a b", "0", "unknown", "\x00", "ü" * 128]


def admitted(table: IdTable, ids: list[str], first: int) -> np.ndarray:
    rows = table.admit(ids)
    table.touch(rows, np.arange(first, first + len(ids)))
    return rows


def test_ids_of_any_shape_are_names_and_never_indices() -> None:
    table = IdTable(100)
    rows = admitted(table, ODD, 1)
    assert rows.tolist() == list(range(1, len(ODD) + 1))
    assert [table.ids[row] for row in rows] == ODD
    assert table.lookup(ODD).tolist() == rows.tolist()


def test_looking_up_an_unknown_id_admits_nothing() -> None:
    table = IdTable(100)
    assert table.lookup(["a", "b"]).tolist() == [0, 0]
    assert len(table) == 0
    assert table.rows == 1


def test_a_full_table_admits_nothing_until_something_is_evicted() -> None:
    table = IdTable(3)
    admitted(table, ["a", "b", "c"], 1)
    with pytest.raises(OverflowError, match="3 ids"):
        table.admit(["d"])
    assert table.admit(["a"]).tolist() == [1]


def test_the_least_recently_used_goes_first_and_its_row_comes_back() -> None:
    table = IdTable(4)
    admitted(table, ["a", "b", "c", "d"], 1)
    admitted(table, ["a"], 5)
    oldest = table.least_recently_used(2)
    assert table.evict(oldest) == ["b", "c"]
    assert table.lookup(["a", "b", "c", "d"]).tolist() == [1, 0, 0, 4]
    assert admitted(table, ["e", "f"], 6).tolist() == [2, 3]  # the row freed first comes first
    assert table.least_recently_used(9).tolist() == [4, 1, 2, 3]


def test_a_saved_table_is_the_same_table() -> None:
    table, again = IdTable(20), IdTable(20)
    admitted(table, ODD, 1)
    table.evict(table.least_recently_used(4))
    again.load(table.state())
    assert again.least_recently_used(99).tolist() == table.least_recently_used(99).tolist()
    for one in (table, again):
        admitted(one, ["x", "y", "z", "w", "v"], 50)
    assert differences(table.state(), again.state()) == []
    assert again.ids == table.ids
