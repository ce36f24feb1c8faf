"""A delimited file of items: an id, a title, and every other column an attribute."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from replay.datasets.base import DatasetError, Item
from replay.datasets.delimited import DELIMITERS, is_id
from replay.datasets.files import DataFile, plain_file

# names that columns have in well-known data sets, in lower case without `_`, for a file without a map
_IDS = ("itemid", "movieid", "productid", "articleid", "bookid", "isbn", "asin", "iid", "id", "item", "sku")
_TITLES = ("title", "name", "itemname", "productname", "booktitle")
_LIST = "|"  # between the values of one cell

Value = str | int | float


def load_items(path: Path, columns: Mapping[str, str] | None = None) -> tuple[Item, ...]:
    """The items of a file whose first line names the columns (separated by commas, tabs, semicolons or `::`).

    `columns` maps `item_id`, `title` and the names that attributes shall have to columns; None recognises common
    names of ids and titles, and takes every other column as it is. An empty cell is absent, `a|b` is a list, and what
    looks like a number is one. Raises DatasetError.
    """
    file = plain_file(path)
    names, *rest = _rows(file)
    place = {field: names.index(column) for field, column in _mapped(file, names, columns).items()}
    return tuple(_item(file, number, fields, place) for number, fields in enumerate(rest, 2) if any(fields))


def _rows(file: DataFile) -> Iterator[list[str]]:
    text, first = file.text(), file.first_line()
    delimiter = next((each for each in DELIMITERS if each in first and each != _LIST), ",")
    if len(delimiter) > 1:
        yield from ([cell.strip() for cell in line.split(delimiter)] for line in text.splitlines())
    else:
        yield from ([cell.strip() for cell in row] for row in csv.reader(io.StringIO(text), delimiter=delimiter))


def _mapped(file: DataFile, names: Sequence[str], columns: Mapping[str, str] | None) -> dict[str, str]:
    found = dict(columns or {})
    if columns is None:
        plain = {name.lower().replace("_", ""): name for name in reversed(names)}
        for field, known in (("item_id", _IDS), ("title", _TITLES)):
            if there := [plain[name] for name in known if name in plain]:
                found[field] = there[0]
        found |= {name: name for name in names if name and name not in found.values()}
    missing = [column for column in found.values() if column not in names]
    if missing or "item_id" not in found:
        problem = f"no column {missing[0]!r}" if missing else "no column is known to be the item_id"
        raise DatasetError(f"{file.label}, line 1: {problem}; there are {', '.join(names)} (see --item-columns)")
    return found


def _item(file: DataFile, number: int, fields: list[str], place: Mapping[str, int]) -> Item:
    cells = {field: fields[at] for field, at in place.items() if at < len(fields)}
    item_id, title = cells.pop("item_id", ""), cells.pop("title", "")
    if not is_id(item_id):
        raise DatasetError(f"{file.label}, row {number}: item_id must be 1 to 256 bytes long")
    return Item(item_id, title, {name: _value(cell) for name, cell in cells.items() if cell})


def _value(cell: str) -> Value | list[Value]:
    if _LIST in cell:
        return [_single(part.strip()) for part in cell.split(_LIST) if part.strip()]
    return _single(cell)


def _single(text: str) -> Value:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text and math.isfinite(number):  # "007" and "1e5" are names
            return number
    return text


def parse_item_columns(text: str) -> dict[str, str]:
    """`item_id=movieId,title=title,genres=genres` as a map; ValueError with what is allowed."""
    columns = {field.strip(): column.strip() for field, _, column in (pair.partition("=") for pair in text.split(","))}
    if not all([*columns, *columns.values()]) or "item_id" not in columns:
        raise ValueError("give NAME=COLUMN pairs separated by commas, item_id among them")
    return columns
