"""Delimited files of any make."""

import csv
import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.datasets import DatasetError, Interaction, delimited


def write(folder: Path, text: str, name: str = "events.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def rows(path: Path, *args: object, **options: object) -> list[Interaction]:
    return list(delimited.load(path, *args, **options).interactions())  # type: ignore[arg-type]


def failure(path: Path, **options: object) -> str:
    with pytest.raises(DatasetError) as caught:
        delimited.load(path, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


EXPECTED = [
    Interaction("007", "NA", 1_700_000_000_000, 4.5),
    Interaction("用户", "b c", 1_700_000_001_000, None),
]


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|", "::"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("packed", [False, True])
def test_delimiters_line_ends_marks_and_gzip_make_no_difference(
    tmp_path: Path, delimiter: str, end: str, mark: str, packed: bool
) -> None:
    lines = ["user,item,x,ts,rating", "007,NA,,1700000000,4.5", "用户,b c,y,1700000001,"]
    data = (mark + end.join(lines) + end).replace(",", delimiter).encode()
    path = tmp_path / "events.csv.gz"
    path.write_bytes(gzip.compress(data) if packed else data)
    assert rows(path) == EXPECTED


def test_a_column_map_chooses_columns_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "when,who,what,how,id\n1700000000,u,i,view,e1\n")
    columns = delimited.parse_columns("user_id=who, item_id=what,timestamp=when,event_type=how,event_id=id")
    assert rows(path, columns) == [Interaction("u", "i", 1_700_000_000_000, None, "view", "e1")]


def test_a_column_map_chooses_columns_by_number_without_a_header(tmp_path: Path) -> None:
    path = write(tmp_path, "i1::u1::5\ni2::u2::3\n", "events.dat")
    columns = {"item_id": "1", "user_id": "2", "value": "3"}
    found = rows(path, columns, header=False)
    assert found == [Interaction("u1", "i1", None, 5.0), Interaction("u2", "i2", None, 3.0)]


@pytest.mark.parametrize("header", [
    "userId,movieId,rating,timestamp",
    "USER_ID,item_id,value,time",
    "user,item,score,datetime",
    "visitorid,itemid,x,ts",
])  # fmt: skip
def test_common_names_are_recognised(tmp_path: Path, header: str) -> None:
    (only,) = rows(write(tmp_path, f"{header}\n1,2,3,1700000000\n"))
    assert (only.user, only.item, only.timestamp_ms) == ("1", "2", 1_700_000_000_000)


@pytest.mark.parametrize(("text", "expected"), [
    ("1700000000", 1_700_000_000_000),
    ("1700000000.5", 1_700_000_000_500),
    ("1700000000123", 1_700_000_000_123),
    ("1700000000123456", 1_700_000_000_123),
    ("2023-11-14T22:13:20Z", 1_700_000_000_000),
    ("2023-11-15T00:13:20.250+02:00", 1_700_000_000_250),
    ("2023-11-14 22:13:20", 1_700_000_000_000),
    ("2023-11-14", 1_699_920_000_000),
    ("0", 0),
])  # fmt: skip
def test_times_are_numbers_by_magnitude_or_iso_8601_in_utc(tmp_path: Path, text: str, expected: int) -> None:
    path = write(tmp_path, f"user,item,timestamp\nu,i,{text}\n")
    assert [row.timestamp_ms for row in rows(path)] == [expected]


def test_rows_come_by_time_and_rows_of_one_time_as_they_lie_in_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path, "user,item,ts\na,1,1700000002\nb,2,2023-11-14T22:13:20Z\nc,3,1700000000000\nd,4,1700000002\n"
    )
    assert "".join(row.user for row in rows(path)) == "bcad"


def test_without_times_the_order_is_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, "user,item\nb,1\na,2\n")
    assert rows(path) == [Interaction("b", "1", None), Interaction("a", "2", None)]
    with pytest.raises(DatasetError, match="no timestamps"):
        delimited.load(path).index_at(0)


def test_quotes_commas_and_line_ends_inside_a_field(tmp_path: Path) -> None:
    path = write(tmp_path, 'user,title,item\nu,"a, ""b""\nc",i\nv,"",j\n')
    assert [(row.user, row.item) for row in rows(path)] == [("u", "i"), ("v", "j")]


def test_latin_1_is_read_as_such(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_bytes("user,item\nJosé,Misérables\n".encode("latin-1"))
    assert [(row.user, row.item) for row in rows(path)] == [("José", "Misérables")]


@pytest.mark.parametrize(("line", "problem"), [
    (",i,1700000000,1", "user_id"),
    ("u,,1700000000,1", "item_id"),
    ("u,i,yesterday,1", "'yesterday'"),
    ("u,i", "ends too early"),
    ("u,i,-5,1", "timestamp"),
    ("u,i,1e30,1", "timestamp"),
    ("u,i,1700000000,many", "'many'"),
    ("u,i,1700000000,inf", "'inf'"),
    ("u,i,1700000000,1,2,3,4", "7 columns, not 4"),
    (f"{'x' * 257},i,1700000000,1", "256 bytes"),
])  # fmt: skip
def test_the_wrong_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    good = "u,i,1700000000,1"
    path = write(tmp_path, "\n".join(["user,item,ts,rating", good, "", '"u\nv",i,1700000000,1', line, good]) + "\n")
    message = failure(path)
    assert "line 6" in message
    assert problem in message


def test_an_empty_cell_is_absent_and_a_row_without_a_time_stays_behind_the_row_before_it(tmp_path: Path) -> None:
    lines = ["user,item,ts,type,id,rating", "a,1,1700000009,,,", "b,2,,view,,1", "c,3,1700000000,,e,2"]
    assert rows(write(tmp_path, "\n".join(lines)), delimited.parse_columns(
        "user_id=user,item_id=item,timestamp=ts,event_type=type,event_id=id,value=rating"
    )) == [
        Interaction("c", "3", 1_700_000_000_000, 2.0, None, "e"),
        Interaction("a", "1", 1_700_000_009_000, None),
        Interaction("b", "2", None, 1.0, "view"),
    ]  # fmt: skip


@pytest.mark.parametrize("last", ["u,i,1700000004,5", "u,i,1700000004,"])
def test_bad_lines_are_left_out_and_counted_where_that_is_wanted(tmp_path: Path, last: str) -> None:
    bad = [",i,1,1", "u,,1,1", "u,i,yesterday,1", "u,i,1,many", "u,i,1,1,1", "u,i", "u,i,1700000003,4"]
    path = write(tmp_path, "\n".join(["user,item,ts,rating", *bad, "", last]))
    said: list[str] = []
    found = rows(path, skip_bad_lines=True, say=said.append)
    assert [row.timestamp_ms for row in found] == [1_700_000_003_000, 1_700_000_004_000]
    assert said == [f"{path}: left out because they cannot be read: 6 of its lines"]
    assert "line 2" in failure(path) or "line 6" in failure(path)


def test_a_file_of_nothing_but_bad_lines_is_an_error(tmp_path: Path) -> None:
    assert "no line can be read" in failure(write(tmp_path, "user,item,ts\nu,i,never\n"), skip_bad_lines=True)


def test_the_wrong_line_is_named_with_a_delimiter_of_two_characters(tmp_path: Path) -> None:
    path = write(tmp_path, "u::i::5\n\nu::i::five\n", "events.dat")
    columns = {"user_id": "1", "item_id": "2", "value": "3"}
    assert "line 3" in failure(path, columns=columns, header=False)


def test_a_line_that_is_cut_short_is_named(tmp_path: Path) -> None:
    assert "line 3" in failure(write(tmp_path, "user,item,ts\nu,i,1700000000\nu,i"))


def test_a_missing_column_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    path = write(tmp_path, "who,what\nu,i\n")
    assert "no column is known to be the user_id; there are who, what" in failure(path)
    assert "no column 'whom'; there are who, what" in failure(path, columns={"user_id": "whom", "item_id": "what"})
    assert "item_id" in failure(path, columns={"user_id": "who"})


def test_something_without_a_delimiter_is_an_error(tmp_path: Path) -> None:
    assert "line 1: no delimiter" in failure(write(tmp_path, "just text\n"))


def test_a_git_lfs_pointer_and_a_missing_file_are_named(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    assert "Git LFS pointer" in failure(write(tmp_path, pointer))
    assert "No such file" in failure(tmp_path / "missing.csv")


@pytest.mark.parametrize("text", ["user=x", "user_id", "user_id=,item_id=b", ""])
def test_a_column_map_that_is_wrong_says_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="user_id, item_id, timestamp, value, event_type, event_id"):
        delimited.parse_columns(text)


_names = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00", exclude_categories=["Cs"]), min_size=1)


@given(pairs=st.lists(st.tuples(_names, _names), min_size=1, max_size=20))
def test_any_ids_come_back_as_they_are(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]) -> None:
    pairs = [(user[:60], item[:60]) for user, item in pairs]
    path = tmp_path_factory.getbasetemp() / "any.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerows([("user", "item"), *pairs])
    assert [(row.user, row.item) for row in rows(path)] == pairs
