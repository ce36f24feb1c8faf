"""What `--describe` writes before the records: users, items and the folds u1 to u5, as the data set has them."""

import json
from pathlib import Path

import numpy as np
import pytest

from replay.datasets import DatasetError, movielens
from replay.datasets.base import User
from tests.replay.test_movielens import MOVIES, RATINGS, recbole, u_data

USERS = {
    "u.user": "1|24|M|technician|85711\n2|53|F|other|94043\n",
    "users.dat": "1::M::24::technician::85711\n2::F::53::other::94043\n",
    "ml-100k.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    "1\t24\tM\ttechnician\t85711\n2\t53\tF\tother\t94043\n",
}
KNOWN = (
    User("1", {"gender": "M", "occupation": "technician", "age": 24}),
    User("2", {"gender": "F", "occupation": "other", "age": 53}),
)


def written(capsysbinary: pytest.CaptureFixture[bytes], *words: object) -> list[dict[str, object]]:
    from replay.__main__ import main

    assert main(["movielens", "--stdout", *map(str, words)]) == 0
    return [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]


def folder(path: Path, *folds: tuple[str, list[int]], users: str = "u.user") -> Path:
    (path / "u.data").write_text(u_data(RATINGS))
    (path / "u.item").write_text(MOVIES["u.item"])
    (path / users).write_text(USERS[users])
    for name, rows in folds:
        (path / f"{name}.test").write_text(u_data([RATINGS[row] for row in rows]))
    return path


@pytest.mark.parametrize("name", list(USERS))
def test_users_are_read_in_every_format(tmp_path: Path, name: str) -> None:
    assert movielens.read(folder(tmp_path, users=name), "ml").people == KNOWN


def test_a_line_that_is_no_user_is_named(tmp_path: Path) -> None:
    (folder(tmp_path) / "u.user").write_text("1|24|M|technician|85711\nnobody\n")
    with pytest.raises(DatasetError, match=r"u\.user, line 2: not a user: 'nobody'"):
        movielens.read(tmp_path, "ml")


def test_descriptions_and_folds_come_before_the_records(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    folds = [(f"u{n + 1}", [n]) for n in range(5)]
    lines = written(capsysbinary, "--path", folder(tmp_path, *folds), "--describe")
    assert [line.get("describes") for line in lines] == ["user"] * 2 + ["item"] * 2 + ["fold"] * 5 + [None] * 5
    assert lines[0] == {"describes": "user", "user_id": "1", "attributes": KNOWN[0].attributes}
    assert lines[2]["attributes"]["year"] == 1995  # type: ignore[index]
    records = lines[9:]
    for fold, n in zip(lines[4:9], range(5), strict=True):
        (number,) = fold["test"]  # type: ignore[misc]
        user, item, *_ = RATINGS[n]
        assert (records[number]["user_id"], records[number]["item_id"]) == (str(user), str(item))


def test_a_part_of_a_data_set_has_no_folds(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    folds = [(f"u{n + 1}", [n]) for n in range(5)]
    lines = written(capsysbinary, "--path", folder(tmp_path, *folds), "--describe", "--limit", "3")
    assert "fold" not in {line.get("describes") for line in lines}


def test_without_the_word_there_are_records_alone(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert len(written(capsysbinary, "--path", folder(tmp_path))) == len(RATINGS)


def test_a_fold_with_other_ratings_is_refused(tmp_path: Path) -> None:
    folds = [(f"u{n + 1}", [n]) for n in range(5)]
    (folder(tmp_path, *folds) / "u3.test").write_text("9\t9\t5\t881250949\n")
    with pytest.raises(DatasetError, match=r"u3\.test: 1 of its ratings are not among"):
        movielens.read(tmp_path, "ml")


def hundred_thousand() -> list[tuple[int, int, float, int]]:
    """In u.data's place: as many ratings, with its first and its last pair, and times that run backwards."""
    pairs = [(1 + n % 900, 1 + n // 900) for n in range(100_000)]
    pairs[0], pairs[-1] = (196, 242), (12, 203)
    return [(user, item, 3.0, 893_000_000 - n) for n, (user, item) in enumerate(pairs)]


def test_without_their_files_folds_are_the_blocks_that_the_archives_script_cuts(tmp_path: Path) -> None:
    (tmp_path / "ml-100k.inter").write_text(recbole(hundred_thousand()))
    table = movielens.read(tmp_path, "ml")
    assert list(table.folds) == ["u1", "u2", "u3", "u4", "u5"]
    for number, test in enumerate(table.folds.values()):
        expected = np.arange(100_000)[::-1] // 20_000 == number  # in time order, which is backwards here
        np.testing.assert_array_equal(test, expected)


def test_other_files_of_that_length_have_no_folds(tmp_path: Path) -> None:
    (tmp_path / "ml-100k.inter").write_text(recbole(hundred_thousand()[::-1]))
    assert movielens.read(tmp_path, "ml").folds == {}
