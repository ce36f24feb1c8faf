"""A file of items: its columns become titles and attributes."""

from pathlib import Path

import pytest

from replay.datasets import DatasetError
from replay.datasets.base import Item
from replay.datasets.item_file import load_items, parse_item_columns


def items(tmp_path: Path, text: str, columns: dict[str, str] | None = None) -> tuple[Item, ...]:
    path = tmp_path / "products.csv"
    path.write_text(text)
    return load_items(path, columns)


def test_ids_and_titles_are_recognised_and_every_other_column_is_an_attribute(tmp_path: Path) -> None:
    text = 'product_id,Name,genres,year,price,code\n7,"Tee, green",a|b,1995,9.5,007\n8,,,,,\n'
    assert items(tmp_path, text) == (
        Item("7", "Tee, green", {"genres": ["a", "b"], "year": 1995, "price": 9.5, "code": "007"}),
        Item("8", "", {}),
    )


def test_a_map_chooses_and_names_the_columns(tmp_path: Path) -> None:
    columns = parse_item_columns("item_id=k,title=t,kind=c")
    assert items(tmp_path, "k\tt\tc\td\nx\tX\tshoes|\tnan\n", columns) == (Item("x", "X", {"kind": ["shoes"]}),)
    assert items(tmp_path, "id::title::x\n1::One::nan\n") == (Item("1", "One", {"x": "nan"}),)


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        ("a,b\n1,2\n", None, "no column is known to be the item_id; there are a, b"),
        ("item_id,b\n1,2\n", {"item_id": "item_id", "title": "c"}, "no column 'c'"),
        ("item_id,b\n1,2\n,3\n", None, "row 3: item_id must be 1 to 256 bytes long"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, columns: dict[str, str] | None, said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        items(tmp_path, text, columns)


@pytest.mark.parametrize("text", ["title=t", "item_id=", "=x,item_id=y", ""])
def test_a_map_without_an_item_id_or_a_column_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="item_id among them"):
        parse_item_columns(text)
