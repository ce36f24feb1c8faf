"""MovieLens in every format that it has, and in every state of disrepair."""

import gzip
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.datasets import DatasetError, Interaction, Item, movielens
from replay.datasets.base import titles

Rating = tuple[int, int, float, int]
RATINGS: list[Rating] = [
    (196, 242, 3.0, 881250949),
    (186, 302, 3.0, 891717742),
    (22, 377, 1.0, 878887116),
    (244, 51, 2.0, 880606923),
    (9, 8, 5.0, 880606923),
]
IN_TIME_ORDER = [RATINGS[i] for i in (2, 3, 4, 0, 1)]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def u_data(ratings: list[Rating]) -> str:
    return "".join(f"{u}\t{i}\t{r:g}\t{t}\n" for u, i, r, t in ratings)


def dat(ratings: list[Rating]) -> str:
    return "".join(f"{u}::{i}::{r:g}::{t}\n" for u, i, r, t in ratings)


def comma(ratings: list[Rating]) -> str:
    return "userId,movieId,rating,timestamp\n" + "".join(f"{u},{i},{r},{t}\n" for u, i, r, t in ratings)


def quoted(ratings: list[Rating]) -> str:
    lines = "".join(f'"{u}","{i}","{r}","{t}"\n' for u, i, r, t in ratings)
    return '"userId","movieId","rating","timestamp"\n' + lines


def recbole(ratings: list[Rating]) -> str:
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    return header + "".join(f"{u}\t{i}\t{r:g}\t{t}\n" for u, i, r, t in ratings)


WRITERS: dict[str, Callable[[list[Rating]], str]] = {
    "u.data": u_data,
    "ratings.dat": dat,
    "ratings.csv": comma,
    "quoted.csv": quoted,
    "ml-100k.inter": recbole,
}
MOVIES = {
    "u.item": (
        "1|Toy Story (1995)|01-Jan-1995||http://x|0|0|0|1|1|1|0|0|0|0|0|0|0|0|0|0|0|0|0\n"
        "2|Misérables, Les (1995)|01-Jan-1995||http://x|0|0|0|0|0|0|0|0|1|0|0|0|1|0|0|0|0|0|0\n"
    ),
    "movies.dat": "1::Toy Story (1995)::Animation|Children's|Comedy\n2::Misérables, Les (1995)::Drama|Musical\n",
    "movies.csv": (
        "movieId,title,genres\n"
        "1,Toy Story (1995),Animation|Children's|Comedy\n"
        '2,"Misérables, Les (1995)",Drama|Musical\n'
    ),
    "ml-100k.item": (
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        "1\tToy Story\t1995\tAnimation Children's Comedy\n"
        "2\tMisérables, Les\t1995\tDrama Musical\n"
    ),
}
ITEMS = (
    Item("1", "Toy Story", {"genres": ["Animation", "Children's", "Comedy"], "year": 1995}),
    Item("2", "Misérables, Les", {"genres": ["Drama", "Musical"], "year": 1995}),
)


def interactions(ratings: list[Rating]) -> list[Interaction]:
    return [Interaction(str(u), str(i), t * 1000, r) for u, i, r, t in ratings]


def read(path: Path) -> list[Interaction]:
    return list(movielens.read(path, "ml").interactions())


def failure(path: Path) -> str:
    with pytest.raises(DatasetError) as caught:
        movielens.read(path, "ml")
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_every_format_reads_the_same_in_time_order_with_ties_in_file_order(
    tmp_path: Path, name: str, end: str, mark: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(mark + WRITERS[name](RATINGS).replace("\n", end).encode())
    assert read(path) == interactions(IN_TIME_ORDER)


@given(
    ratings=st.lists(
        st.tuples(
            st.integers(1, 2**31 - 1),
            st.integers(1, 2**31 - 1),
            st.integers(1, 10).map(lambda half_stars: half_stars / 2),
            st.integers(789_652_009, 2_000_000_000),
        ),
        min_size=1,
        max_size=30,
    ),
    name=st.sampled_from(sorted(WRITERS)),
)
def test_any_ratings_come_back_stably_sorted(
    tmp_path_factory: pytest.TempPathFactory, ratings: list[Rating], name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any-{name}"
    path.write_text(WRITERS[name](ratings))
    assert read(path) == interactions(sorted(ratings, key=lambda rating: rating[3]))


@pytest.mark.parametrize("name", WRITERS)
def test_gzipped_files_are_read_in_place(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress(WRITERS[name](RATINGS).encode()))
    assert read(path) == interactions(IN_TIME_ORDER)


@pytest.mark.parametrize(("ratings", "movies"), [
    ("u.data", "u.item"),
    ("ratings.dat", "movies.dat"),
    ("ratings.csv", "movies.csv"),
    ("ml-100k.inter", "ml-100k.item"),
])  # fmt: skip
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_titles_genres_and_years_come_along_from_a_zip_a_folder_and_a_file_beside(
    tmp_path: Path, ratings: str, movies: str, encoding: str
) -> None:
    inner = tmp_path / "ml-some"
    inner.mkdir()
    (inner / ratings).write_text(WRITERS[ratings](RATINGS))
    (inner / movies).write_bytes(MOVIES[movies].encode(encoding))
    with zipfile.ZipFile(tmp_path / "ml-some.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (ratings, movies):
            archive.write(inner / name, f"ml-some/{name}")
    for path in (tmp_path / "ml-some.zip", inner, tmp_path, inner / ratings):
        dataset = movielens.read(path, "ml")
        assert dataset.items() == ITEMS
        assert list(dataset.interactions()) == interactions(IN_TIME_ORDER)


def test_a_title_is_shown_with_its_year(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(comma(RATINGS))
    (tmp_path / "movies.csv").write_text(MOVIES["movies.csv"] + "3,Untitled,(no genres listed)\n")
    dataset = movielens.read(tmp_path, "ml")
    assert titles(dataset) == {"1": "Toy Story (1995)", "2": "Misérables, Les (1995)", "3": "Untitled"}
    assert dataset.items()[2].attributes == {"genres": []}


def test_a_part_can_be_read_by_number_and_by_time(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text(u_data(RATINGS))
    dataset = movielens.read(tmp_path, "ml")
    assert list(dataset.interactions(3)) == interactions(IN_TIME_ORDER[3:])
    assert dataset.index_at(880_606_923_000) == 1
    assert dataset.index_at(880_606_923_001) == 3
    assert len(dataset) == 5


@pytest.mark.parametrize("wrong", [
    "1\t2\t3",  # cut off
    "1\t2\tthree\t881250949",
    "1.5\t2\t3\t881250949",
    "1\t2\t3\t",
    "99999999999999\t2\t3\t881250949",
    "1\t2147483648\t3\t881250949",
    "1\t2\t1e400\t881250949",
    "1\t2\tnan\t881250949",
    "1\t2\t3\t-881250949",
    "<html>",
])  # fmt: skip
@pytest.mark.parametrize("later", [[], ["also wrong"]])
def test_the_first_wrong_line_is_named(tmp_path: Path, wrong: str, later: list[str]) -> None:
    path = tmp_path / "u.data"
    lines = u_data(RATINGS).splitlines()
    path.write_text("\n".join([*lines[:3], wrong, *lines[3:], *later]))
    assert "line 4" in failure(path)


@pytest.mark.parametrize("name", WRITERS)
def test_a_timestamp_that_was_cut_off_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(WRITERS[name](RATINGS)[:-6])
    last = len(WRITERS[name](RATINGS).splitlines())
    assert f"line {last}" in failure(path)


@pytest.mark.parametrize("name", ["ratings.csv", "u.data", "ml-1m.zip", "ratings.csv.gz"])
def test_a_git_lfs_pointer_is_recognised(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(POINTER)
    message = failure(path)
    assert "Git LFS pointer" in message
    assert "line 1" in message


def test_a_git_lfs_pointer_inside_a_zip_is_recognised(tmp_path: Path) -> None:
    path = zipped(tmp_path, {"ml-1m/ratings.dat": POINTER})
    assert "ratings.dat, line 1: a Git LFS pointer" in failure(path)


@pytest.mark.parametrize("first", [b"<!DOCTYPE html><html>", b"", b"\x00\x01\x02", b"user,item\n1,2\n"])
def test_something_else_is_named_with_its_line(tmp_path: Path, first: bytes) -> None:
    path = tmp_path / "ratings.csv"
    path.write_bytes(first)
    assert "line 1" in failure(path)


def zipped(folder: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    path = folder / "ml-some.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9, 0.999])
def test_a_truncated_zip_is_one_clear_error(tmp_path: Path, kept: float) -> None:
    path = zipped(tmp_path, {"ml/u.data": u_data(RATINGS * 1000).encode()})
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    assert "damaged or cut short" in failure(path)


def test_a_flipped_byte_in_a_zip_is_one_clear_error(tmp_path: Path) -> None:
    path = zipped(tmp_path, {"ml/u.data": u_data(RATINGS * 1000).encode()}, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    # a digit of a rating becomes another digit: only the checksum can tell
    place = data.index(b"\t3\t")
    data[place + 1] = ord("4")
    path.write_bytes(bytes(data))
    assert "damaged" in failure(path)


def test_a_truncated_gzip_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv.gz"
    data = gzip.compress(comma(RATINGS * 1000).encode())
    path.write_bytes(data[: len(data) // 2])
    assert "damaged or cut short" in failure(path)


@pytest.mark.parametrize("name", ["../u.data", "/etc/u.data", "ml/../../u.data", "..\\u.data", "C:/u.data"])
def test_a_zip_with_a_name_that_leads_outside_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "in" / "here"
    folder.mkdir(parents=True)
    path = zipped(folder, {"ml/u.data": u_data(RATINGS).encode(), name: b"1\t1\t1\t881250949\n"})
    assert "refused" in failure(path)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("ml/u.data", "w") as member:
        member.write(u_data(RATINGS).encode())
        for _ in range(64):
            member.write(b"0" * (1 << 20))
    path = tmp_path / "ml-some.zip"
    path.write_bytes(bomb.getvalue())
    assert "unpacks to more than" in failure(path)
    path = tmp_path / "u.data.gz"
    path.write_bytes(gzip.compress(u_data(RATINGS).encode() + b"0" * (64 << 20)))
    assert "unpacks to more than" in failure(path)


def test_a_movie_line_that_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(comma(RATINGS))
    for name, wrong in (("movies.csv", "x,y\n"), ("movies.dat", "3::only\n"), ("u.item", "3|only\n")):
        path = tmp_path / name
        path.write_text(MOVIES[name] + wrong)
        expected = len(MOVIES[name].splitlines()) + 1
        with pytest.raises(DatasetError, match=rf"{name}, line {expected}: not a movie"):
            movielens.read(tmp_path, "ml")
        path.unlink()


def test_a_folder_without_ratings_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    assert "u.data, ratings.dat, ratings.csv" in failure(tmp_path)


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "no such file or folder" in failure(tmp_path / "missing.zip")


def test_ids_of_events_are_named_after_the_file_that_is_given(tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text(comma(RATINGS))
    assert movielens.load(path=path).name == "ratings"
