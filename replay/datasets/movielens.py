"""MovieLens in all its formats: `u.data`, `ratings.dat` (`::`), `ratings.csv`, and RecBole's typed TSV."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from replay.datasets import download
from replay.datasets.base import DatasetError, Item, Table
from replay.datasets.files import DataFile, data_files, plain_file
from replay.datasets.movielens_people import find_folds, read_users

HOME = "https://files.grouplens.org/datasets/movielens"
DEFAULT_CACHE = Path(".freshet/datasets")
# MD5 as GroupLens publishes it beside each archive; latest-small changes from time to time
VERSIONS: dict[str, str | None] = {
    "100k": "0e33842e24a9c977be4e0107933c0723",
    "latest-small": None,
    "1m": "c4d9eecfca2ab87c1945afe126590906",
    "10m": "ce571fd55effeba0271552578f2648bd",
    "20m": "cd245b17a1ae2cc31bb14903e1204af3",
    "25m": "6b51fb2759a8657d3bfcbfc42b592ada",
    "32m": "d472be332d4daa821edc399621853b57",
}
_RATINGS = ("u.data", "ratings.dat", "ratings.csv", "ml-100k.inter")
_USERS = ("u.user", "users.dat", "ml-100k.user")
_ITEMS = ("u.item", "movies.dat", "movies.csv", "ml-100k.item")
_MAX_ID = np.iinfo(np.int32).max
_EPOCH_S = 788_918_400  # MovieLens began in 1995; an earlier time is a number that was cut off
# fmt: off
_GENRES = (  # in the order of u.item's flags
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
    "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)
# fmt: on
_NO_GENRES = {"", "unknown", "(no genres listed)"}
_TITLE_YEAR = re.compile(r"(?P<title>.*\S)\s*\((?P<year>\d{4})\)")


def load(
    version: str = "100k",
    path: Path | None = None,
    cache_dir: Path = DEFAULT_CACHE,
    home: str = HOME,
    say: Callable[[str], None] = lambda _: None,
) -> Table:
    """One version of MovieLens in time order, with its titles.

    Read from `path` (file, folder or zip) where given, else from `cache_dir`, downloaded first if need be.
    `say` is told in a line what happens otherwise than expected. Raises DatasetError.
    """
    name = f"ml-{version}" if path is None else _plain_name(path)
    return read(path or _cached(version, cache_dir, home, say), name)


def _plain_name(path: Path) -> str:
    return path.name.split(".", 1)[0] or "movielens"


def _cached(version: str, cache_dir: Path, home: str, say: Callable[[str], None]) -> Path:
    if version not in VERSIONS:
        raise DatasetError(f"no MovieLens version {version!r}; there are: {', '.join(VERSIONS)}")
    name = f"ml-{version}.zip"
    wheel = cache_dir / download.RECBOLE_WHEEL
    if (cache_dir / name).exists():
        return cache_dir / name
    if version == "100k" and wheel.exists():
        return wheel
    try:
        return download.fetch(f"{home}/{name}", cache_dir / name, VERSIONS[version])
    except download.UnreachableError as error:
        if version != "100k":
            raise DatasetError(
                f"{error}. Put {name} from https://grouplens.org/datasets/movielens/ into {cache_dir}, "
                "or name it with --path"
            ) from error
        say(f"{error}; taking MovieLens-100k from the recbole package instead")
        return download.fetch_recbole(cache_dir)


def read(path: Path, name: str) -> Table:
    """The ratings of a file, folder or zip in time order (ties in file order), with titles where found."""
    files = data_files(path)
    ratings = _pick(files, _RATINGS)
    if ratings is None and len(files) == 1:
        (ratings,) = files.values()  # a file of any name; its first line will tell
    if ratings is None:
        raise DatasetError(f"{path}: none of {', '.join(_RATINGS)} in it")
    described = _pick(files, _ITEMS) or _beside(path)
    items = () if described is None else tuple(read_items(described))
    people = _pick(files, _USERS)
    table = _in_file_order(ratings, name, items)
    table = replace(table, people=() if people is None else read_users(people), folds=find_folds(files, table))
    return table.in_time_order()


def _pick(files: Mapping[str, DataFile], names: Iterable[str]) -> DataFile | None:
    return next((files[name] for name in names if name in files), None)


def _beside(path: Path) -> DataFile | None:
    found = (path.with_name(name) for name in _ITEMS)
    return next((plain_file(file) for file in found if file.is_file()), None)


@dataclass(frozen=True)
class _Format:
    """How the ratings lie in a file."""

    separator: str  # one character, as fast parsers want it
    names: tuple[str, ...]  # of the columns, in order
    header: bool
    line: re.Pattern[str]  # what a line must look like; for finding the one that does not


def _pattern(separator: str) -> re.Pattern[str]:
    quote = '"?'
    fields = (r"(\d+)", r"(\d+)", r"(\d+(?:\.\d+)?)", r"(\d+)")
    return re.compile(separator.join(f"{quote}{field}{quote}" for field in fields))


_COLUMNS = ("user", "item", "rating", "timestamp")
_TYPES = dict(zip(_COLUMNS, (np.int32, np.int32, np.float32, np.int64), strict=True))
_CSV = _Format(",", _COLUMNS, True, _pattern(","))
_RECBOLE = _Format("\t", _COLUMNS, True, _pattern("\t"))
_U_DATA = _Format("\t", _COLUMNS, False, _pattern("\t"))
# between the two colons lies an empty column
_DAT = _Format(":", ("user", "_0", "item", "_1", "rating", "_2", "timestamp"), False, _pattern("::"))


def _ratings_format(file: DataFile) -> _Format:
    line = file.first_line()
    if line.replace('"', "").lower().startswith("userid,movieid,rating,timestamp"):
        return _CSV
    if line.startswith("user_id:token\titem_id:token\trating:float\ttimestamp:float"):
        return _RECBOLE
    for known in (_U_DATA, _DAT):
        if known.line.match(line):
            return known
    raise DatasetError(f"{file.label}, line 1: not ratings as MovieLens has them: {line[:60]!r}")


def read_ratings(file: DataFile, name: str, items: tuple[Item, ...] = ()) -> Table:
    """The ratings of one file in time order; DatasetError with the first line that is wrong."""
    return _in_file_order(file, name, items).in_time_order()


def _in_file_order(file: DataFile, name: str, items: tuple[Item, ...]) -> Table:
    form = _ratings_format(file)
    try:
        with file.open() as data:
            frame = pd.read_csv(
                data,
                sep=form.separator,
                header=0 if form.header else None,
                names=form.names,
                usecols=list(_TYPES),
                dtype=_TYPES,
            )
    except (ValueError, OverflowError) as error:  # pandas' own errors are ValueErrors
        raise _wrong_line(file, form, str(error)) from error
    seconds = frame["timestamp"].to_numpy()
    if not (np.isfinite(frame["rating"]).all() and (seconds >= _EPOCH_S).all()):
        raise _wrong_line(file, form, "a rating or a timestamp is wrong")
    return Table(
        name,
        frame["user"].to_numpy(),
        frame["item"].to_numpy(),
        seconds * 1000,
        frame["rating"].to_numpy(),
        descriptions=items,
    )


def _wrong_line(file: DataFile, form: _Format, reason: str) -> DatasetError:
    """The error that names the first wrong line: slow, and only on the way out."""
    with file.open() as data:
        for number, raw in enumerate(io.TextIOWrapper(data, "latin-1"), 1):
            line = raw.strip().removeprefix("\xef\xbb\xbf")
            match = form.line.fullmatch(line)
            if (form.header and number == 1) or not line:
                continue
            if match is None or max(int(match[1]), int(match[2])) > _MAX_ID:
                return DatasetError(f"{file.label}, line {number}: not a rating: {line[:60]!r}")
            if int(match[4]) < _EPOCH_S:
                return DatasetError(f"{file.label}, line {number}: no time since 1995: {match[4]}")
    return DatasetError(f"{file.label}: {reason}")


def read_items(file: DataFile) -> Iterator[Item]:
    """Titles, genres and years of one file; DatasetError with the line that is wrong."""
    line = file.first_line()
    if line.startswith("item_id:token"):
        return _recbole_items(file)
    if line.replace('"', "").lower().startswith("movieid,title,genres"):
        return _csv_items(file)
    if re.match(r"\d+::", line):
        return _dat_items(file)
    if re.match(r"\d+\|", line):
        return _u_items(file)
    raise DatasetError(f"{file.label}, line 1: not movies as MovieLens has them: {line[:60]!r}")


def _rows(file: DataFile, separator: str, least: int, skip: int = 0) -> Iterator[list[str]]:
    for number, line in enumerate(file.text().split("\n"), 1):
        if number <= skip or not line.strip():
            continue
        fields = line.split(separator)
        if len(fields) < least or not fields[0].isdecimal():
            raise DatasetError(f"{file.label}, line {number}: not a movie: {line[:60]!r}")
        yield fields


def _u_items(file: DataFile) -> Iterator[Item]:
    for item_id, title, released, _, _, *flags in _rows(file, "|", 5 + len(_GENRES)):
        genres = (genre for genre, flag in zip(_GENRES, flags, strict=False) if flag == "1")
        yield _item(item_id, title, genres, released[-4:])


def _dat_items(file: DataFile) -> Iterator[Item]:
    for item_id, *title, genres in _rows(file, "::", 3):
        yield _item(item_id, "::".join(title), genres.split("|"))


def _recbole_items(file: DataFile) -> Iterator[Item]:
    for item_id, title, year, genres, *_ in _rows(file, "\t", 4, skip=1):
        yield _item(item_id, title, genres.split(), year)


def _csv_items(file: DataFile) -> Iterator[Item]:
    reader = csv.reader(io.StringIO(file.text()), strict=True)
    try:
        next(reader)
        for fields in reader:
            if fields:
                item_id, title, genres = fields[:3]
                yield _item(str(int(item_id)), title, genres.split("|"))
    except (csv.Error, ValueError) as error:
        raise DatasetError(f"{file.label}, line {reader.line_num}: not a movie ({error})") from error


def _item(item_id: str, title: str, genres: Iterable[str], year: str = "") -> Item:
    titled = _TITLE_YEAR.fullmatch(title.strip())
    if titled is not None:
        title, year = titled["title"], titled["year"]
    attributes: dict[str, Any] = {"genres": [genre for genre in genres if genre not in _NO_GENRES]}
    if year.isdecimal():
        attributes["year"] = int(year)
    return Item(item_id, title.strip(), attributes)
