"""Any delimited file as a data set: CSV, TSV, `::` and their like, gzipped or not, with a column map."""

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from replay.datasets.base import NO_TIME, DatasetError, Table
from replay.datasets.files import DataFile, decode, plain_file

FIELDS = ("user_id", "item_id", "timestamp", "value", "event_type", "event_id")
# names that columns have in well-known data sets, in lower case without `_`, for a file without a map
_KNOWN = {
    "user_id": ("userid", "user", "visitorid", "customerid", "uid"),
    "item_id": ("itemid", "item", "movieid", "productid", "articleid", "bookid", "isbn", "asin", "iid"),
    "timestamp": ("timestamp", "timestampms", "time", "ts", "datetime", "date"),
    "value": ("value", "rating", "score", "overall"),
    "event_type": ("eventtype", "event", "action", "type"),
    "event_id": ("eventid",),
}
DELIMITERS = ("::", "\t", ",", ";", "|")
_INNER = "\x1f"  # the unit separator stands in for a delimiter of several characters
_MAX_ID_BYTES = 256


@dataclass(frozen=True)
class Layout:
    """How the rows lie in a file."""

    columns: Mapping[str, str]  # field -> name of its column; its number, from 1, without a header
    delimiter: str
    header: bool = True
    skip_bad_lines: bool = False  # such with too many columns


def parse_columns(text: str) -> dict[str, str]:
    """`user_id=userId,item_id=movieId` as a map; ValueError with what is allowed."""
    pairs = [pair.partition("=")[::2] for pair in text.split(",")]
    columns = {field.strip(): column.strip() for field, column in pairs}
    unknown = [field for field in columns if field not in FIELDS]
    if unknown or not all(columns.values()):
        raise ValueError(f"give FIELD=COLUMN pairs separated by commas; fields are {', '.join(FIELDS)}")
    return columns


def load(
    path: Path,
    columns: Mapping[str, str] | None = None,
    delimiter: str | None = None,
    header: bool = True,
    skip_bad_lines: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Table:
    """A delimited file in time order, in file order where it has no times.

    `columns` None recognises common names in the header; `delimiter` None finds it out. Times are numbers
    (seconds, milliseconds or microseconds by magnitude) or ISO-8601. An empty cell of a column other than the ids
    is absent; a row without a time stays behind the row before it. A line that cannot be read raises DatasetError,
    or is left out with `skip_bad_lines`; `say` is told how many were.
    """
    file = plain_file(path)
    first = file.first_line()
    delimiter = delimiter or _sniff(file, first)
    names = _split(first, delimiter)
    if not header:
        names = [str(number) for number in range(1, len(names) + 1)]
    layout = Layout(_map(file, names, columns, header), delimiter, header, skip_bad_lines)
    frame = _frame(file, layout, names)
    fields = _fields(frame)
    bad = np.any([field.wrong for field in fields.values()], axis=0)
    if skip_bad_lines:
        _say_what_is_skipped(file, layout, len(frame), bad, say)
    elif bad.any():
        _fail(file, layout, fields, int(np.argmax(bad)))
    return _table(file, {name: field.clean[~bad] for name, field in fields.items()}).in_time_order()


def _split(line: str, delimiter: str) -> list[str]:
    several = len(delimiter) > 1
    fields = line.split(delimiter) if several else next(csv.reader([line], delimiter=delimiter), [])
    return [field.strip() for field in fields]


def _sniff(file: DataFile, first: str) -> str:
    found = next((delimiter for delimiter in DELIMITERS if delimiter in first), None)
    if found is None:
        raise DatasetError(f"{file.label}, line 1: no delimiter found in {first[:60]!r}; name it (--delimiter)")
    return found


def _map(file: DataFile, names: Sequence[str], columns: Mapping[str, str] | None, header: bool) -> dict[str, str]:
    if columns is None:
        plain = {name.lower().replace("_", ""): name for name in names} if header else {}
        found = {field: [plain[k] for k in known if k in plain] for field, known in _KNOWN.items()}
        columns = {field: matches[0] for field, matches in found.items() if matches}
    missing = [column for column in columns.values() if column not in names]
    unmapped = [field for field in ("user_id", "item_id") if field not in columns]
    if missing or unmapped:
        problem = f"no column {missing[0]!r}" if missing else f"no column is known to be the {unmapped[0]}"
        raise DatasetError(f"{file.label}, line 1: {problem}; there are {', '.join(names)} (see --columns)")
    return dict(columns)


def _frame(file: DataFile, layout: Layout, names: list[str]) -> pd.DataFrame:
    """The mapped columns as text, under their fields' names."""
    try:
        frame = _read(file, layout, names, "utf-8")
    except UnicodeDecodeError:
        frame = _read(file, layout, names, "latin-1")
    except ValueError as error:
        raise _unreadable(file, layout, len(names), error) from error
    short = _cut_short(file, layout, names, frame)
    mapped = {field: frame[column].mask(short, np.nan) for field, column in layout.columns.items()}
    return pd.DataFrame(mapped)  # not a number, where the line ends too early: pandas takes the rest for empty


def _read(file: DataFile, layout: Layout, names: list[str], encoding: str) -> pd.DataFrame:
    several = len(layout.delimiter) > 1
    with file.open() as data:
        source: Any = data
        if several:
            source = io.BytesIO(data.read().replace(layout.delimiter.encode(), _INNER.encode()))
        return pd.read_csv(
            source,
            sep=_INNER if several else layout.delimiter,
            header=0 if layout.header else None,
            names=names,  # all of them, since pandas counts the columns of a line only then
            index_col=False,
            dtype=object,
            keep_default_na=False,
            quoting=csv.QUOTE_NONE if several else csv.QUOTE_MINIMAL,
            encoding=encoding,
            on_bad_lines="skip" if layout.skip_bad_lines else "error",
        )


def _cut_short(file: DataFile, layout: Layout, names: list[str], frame: pd.DataFrame) -> NDArray[np.bool_]:
    """True (N,) where a line has too few columns; the file is read again only if a line may have."""
    short = np.asarray(frame[names[-1]] == "", np.bool_)
    if short.any():
        lengths = [len(fields) for _, fields in _rows(file, layout)][layout.header :]
        kept = np.array([length for length in lengths if length <= len(names)])
        if len(kept) == len(short):  # a line of blanks is one for some readers and none for others
            short = short & (kept < len(names))
    return short


def _unreadable(file: DataFile, layout: Layout, columns: int, error: ValueError) -> DatasetError:
    for number, fields in _rows(file, layout):
        if len(fields) > columns:
            return DatasetError(f"{file.label}, line {number}: {len(fields)} columns, not {columns}")
    return DatasetError(f"{file.label}: {' '.join(str(error).split())}")


def _say_what_is_skipped(
    file: DataFile, layout: Layout, rows: int, bad: NDArray[np.bool_], say: Callable[[str], None]
) -> None:
    too_long = sum(1 for _ in _rows(file, layout)) - layout.header - rows
    if skipped := too_long + int(bad.sum()):
        say(f"{file.label}: left out because they cannot be read: {skipped:,} of its lines")
    if bad.all() and len(bad):
        raise DatasetError(f"{file.label}: no line can be read")


@dataclass(frozen=True, slots=True)
class _Field:
    """One column, converted; where `wrong`, what is wrong with a text is `problem(text)`."""

    texts: NDArray[np.object_]  # (N,)
    clean: NDArray[Any]  # (N,)
    wrong: NDArray[np.bool_]  # (N,)
    problem: Callable[[object], str]


def _fields(frame: pd.DataFrame) -> dict[str, _Field]:
    return {str(field): _CONVERTERS[str(field)](frame[field].to_numpy()) for field in frame}


def _table(file: DataFile, columns: Mapping[str, NDArray[Any]]) -> Table:
    return Table(
        re.sub(r"\W+", "-", Path(file.label).name.split(".", 1)[0]) or "file",
        columns["user_id"],
        columns["item_id"],
        columns.get("timestamp"),
        columns.get("value"),
        columns.get("event_type"),
        columns.get("event_id"),
    )


def is_id(text: object) -> bool:
    return isinstance(text, str) and 1 <= len(text.encode()) <= _MAX_ID_BYTES


def _ids(name: str) -> Callable[[NDArray[np.object_]], _Field]:
    def convert(texts: NDArray[np.object_]) -> _Field:
        good = np.fromiter((is_id(text) for text in texts), bool, len(texts))
        return _Field(texts, texts, ~good, lambda _: f"{name} must be 1 to {_MAX_ID_BYTES} bytes long")

    return convert


def _event_ids(texts: NDArray[np.object_]) -> _Field:
    found = _ids("event_id")(texts)
    return _Field(texts, _or_none(texts), found.wrong & (texts != ""), found.problem)


def _event_types(texts: NDArray[np.object_]) -> _Field:
    no_text = np.fromiter((not isinstance(text, str) for text in texts), bool, len(texts))
    return _Field(texts, _or_none(texts), no_text, lambda _: "no event_type")


def _or_none(texts: NDArray[np.object_]) -> NDArray[np.object_]:
    clean = texts.copy()
    clean[texts == ""] = None
    return clean


def _numbers(texts: NDArray[np.object_]) -> _Field:
    """Values as numbers; an empty one is not a number, which means absent."""
    numbers = np.asarray(pd.to_numeric(pd.Series(texts), errors="coerce"), np.float64)
    wrong = ~np.isfinite(numbers) & (texts != "")
    return _Field(texts, numbers, wrong, lambda text: f"value {text!r} is no finite number")


def _milliseconds(texts: NDArray[np.object_]) -> _Field:
    """Times as milliseconds; NO_TIME where empty."""
    series = pd.Series(texts)
    numbers = np.asarray(pd.to_numeric(series, errors="coerce"), np.float64)
    times = _scaled(numbers)
    rest = ~np.isfinite(times)
    if rest.any():
        iso = pd.to_datetime(series[rest], utc=True, format="ISO8601", errors="coerce")
        times[rest] = np.where(iso.isna(), np.nan, iso.astype("datetime64[ms, UTC]").astype("int64"))
    wrong = ~(times >= 0)
    clean = np.where(wrong, NO_TIME, times).astype(np.int64)
    return _Field(
        texts, clean, wrong & (texts != ""), lambda text: f"timestamp {text!r} is neither a number nor ISO-8601"
    )


_CONVERTERS = {
    "user_id": _ids("user_id"),
    "item_id": _ids("item_id"),
    "timestamp": _milliseconds,
    "value": _numbers,
    "event_type": _event_types,
    "event_id": _event_ids,
}


def _scaled(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Milliseconds of numbers that are seconds, milliseconds or microseconds by their magnitude."""
    factors = np.select([numbers < 1e11, numbers < 1e14, numbers < 1e17], [1000.0, 1.0, 0.001], np.nan)
    return np.asarray(np.rint(numbers * factors), np.float64)


def _fail(file: DataFile, layout: Layout, fields: Mapping[str, _Field], row: int) -> NoReturn:
    field = next(name for name, field in fields.items() if field.wrong[row])
    text = fields[field].texts[row]
    problem = fields[field].problem(text) if isinstance(text, str) else "the line ends too early"
    raise DatasetError(f"{file.label}, line {_line_of(file, layout, row)}: {problem}")


def _line_of(file: DataFile, layout: Layout, row: int) -> int:
    """The line in the file on which row `row` ends; slow, for errors only."""
    found = itertools.islice(_rows(file, layout), row + layout.header, None)
    return next((number for number, _ in found), row + 1 + layout.header)


def _rows(file: DataFile, layout: Layout) -> Iterator[tuple[int, list[str]]]:
    """The fields of each row with the number of its last line, empty lines left out."""
    with file.open() as data:
        text = decode(data.read())
    if len(layout.delimiter) > 1:
        lines = enumerate(text.splitlines(), 1)
        yield from ((number, line.split(layout.delimiter)) for number, line in lines if line)
    else:
        reader = csv.reader(io.StringIO(text), delimiter=layout.delimiter)
        with suppress(csv.Error):  # a field beyond all bounds: what comes after it has no number
            yield from ((reader.line_num, fields) for fields in reader if fields)
