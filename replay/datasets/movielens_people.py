"""What MovieLens tells beside ratings and films: who the users are, and the five folds of ml-100k."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from replay.datasets.base import DatasetError, Table, User
from replay.datasets.files import DataFile

_FOLDS = ("u1", "u2", "u3", "u4", "u5")
# u.data as GroupLens has it begins and ends with these (user, item). The archive's mku.sh cuts it, in this order, into
# five blocks of 20,000 ratings, and each is the test of a fold; so the folds are known without their files, too.
_FIRST, _LAST, _COUNT = (196, 242), (12, 203), 100_000


def read_users(file: DataFile) -> tuple[User, ...]:
    """Age, gender and occupation of the users of one file; DatasetError with the line that is wrong."""
    first = file.first_line()
    separator = "::" if "::" in first else "|" if "|" in first else "\t"
    header = first.startswith("user_id:token")
    users = []
    for number, line in enumerate(file.text().split("\n"), 1):
        row = line.split(separator)
        if not line.strip() or (header and number == 1):
            continue
        if len(row) < 4 or not row[0].isdecimal():
            raise DatasetError(f"{file.label}, line {number}: not a user: {line[:60]!r}")
        users.append(_user(separator, *row[:4]))
    return tuple(users)


def _user(separator: str, user_id: str, second: str, third: str, occupation: str) -> User:
    age, gender = (third, second) if separator == "::" else (second, third)  # users.dat has the gender first
    attributes: dict[str, int | str] = {"gender": gender, "occupation": occupation}
    return User(user_id, attributes | ({"age": int(age)} if age.isdecimal() else {}))


def find_folds(files: Mapping[str, DataFile], table: Table) -> dict[str, NDArray[np.bool_]]:
    """The test ratings of u1 to u5 among the rows of `table`, which is in the order of its file; none elsewhere."""
    tests = {fold: files[f"{fold}.test"] for fold in _FOLDS if f"{fold}.test" in files}
    if len(tests) == len(_FOLDS):
        return {fold: _found(test, table) for fold, test in tests.items()}
    if len(table) != _COUNT or _pair(table, 0) != _FIRST or _pair(table, -1) != _LAST:
        return {}
    blocks = np.arange(_COUNT) // (_COUNT // len(_FOLDS))
    return {fold: blocks == number for number, fold in enumerate(_FOLDS)}


def _pair(table: Table, row: int) -> tuple[int, int]:
    return int(table.users[row]), int(table.item_ids[row])


def _found(file: DataFile, table: Table) -> NDArray[np.bool_]:
    try:
        with file.open() as data:
            pairs = pd.read_csv(data, sep="\t", header=None, usecols=[0, 1], dtype=np.int64).to_numpy()
    except ValueError as error:
        raise DatasetError(f"{file.label}: not ratings as MovieLens has them ({error})") from error
    found = np.isin(_keys(table.users, table.item_ids), _keys(pairs[:, 0], pairs[:, 1]))
    if found.sum() != len(pairs):
        raise DatasetError(f"{file.label}: {len(pairs) - found.sum():,} of its ratings are not among the data set's")
    return found


def _keys(users: NDArray[np.integer], items: NDArray[np.integer]) -> NDArray[np.int64]:
    return users.astype(np.int64) << 32 | items.astype(np.int64)
