"""`python -m worker checkpoints`: what there is, whether it is sound, and what may go."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.clicks import clicks
from tests.offline import ran, small_settings
from worker.__main__ import main
from worker.checkpoint import FORMAT, CheckpointFolder, Saved
from worker.checkpoint_view import prune_checkpoints
from worker.config_view import ENV_FILE_VARIABLE
from worker.events import encode_forget


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the settings, without checkpoints."""
    monkeypatch.delenv(ENV_FILE_VARIABLE, raising=False)
    monkeypatch.setenv("FRESHET_CHECKPOINT__DIR", str(tmp_path / "checkpoints"))
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@pytest.fixture
def saved(folder: Path) -> list[Saved]:
    """Three checkpoints of a growing model, newest first."""
    values = [*clicks(220)[0], encode_forget("u1"), b"{", None]
    settings = small_settings()
    for count in (100, 200, len(values)):
        CheckpointFolder(folder, 10).save(*ran(settings, values[:count]).snapshot())
    return CheckpointFolder(folder, 10).list()


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What the command prints, and its exit code."""
    capsys.readouterr()
    assert main(["checkpoints", *arguments]) == code
    printed = capsys.readouterr()
    return printed.out + printed.err


def names(text: str) -> list[str]:
    return re.findall(r"checkpoint-\d{10}\.pt", text)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def test_the_list_has_a_line_for_each_newest_first(saved: list[Saved], capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys)
    assert names(text) == [each.path.name for each in saved]
    lines = [line for line in text.splitlines() if "checkpoint-" in line]
    for line, records in zip(lines, (223, 200, 100), strict=True):
        assert f" {records} " in line
        assert f"file/0:{records}" in line
        assert "not verified" in line
    assert told(capsys, "list") == text


def test_one_can_be_shown_by_number_name_or_path_and_the_newest_by_nothing(
    saved: list[Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "show")
    assert "records read: 223" in text
    assert '"forgotten": 1' in text
    assert '"rejected": 1' in text
    assert '"file/0": 223' in text
    assert '"family": "two_tower"' in text
    assert re.search(r"users: \d+\n", text)
    for name in ("2", "checkpoint-0000000002.pt", str(saved[1].path)):
        assert "records read: 200" in told(capsys, "show", name)


def test_one_that_is_not_there_is_told_with_those_that_are(
    saved: list[Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "show", "7", code=2)
    assert text.startswith("error: there is no checkpoint '7'; in ")
    assert names(text) == [each.path.name for each in saved]


def test_verify_reads_each_whole_and_names_what_is_damaged(
    saved: list[Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "verify").count(" sound") == 3
    flip(saved[1].path)
    assert "not verified" in told(capsys, "list"), "the list reads no more than headers"
    text = told(capsys, "verify", code=1)
    assert text.count(" sound") == 2
    assert f"{saved[1].path}: the content does not match its checksum" in " ".join(text.split())
    assert "does not match its checksum" in told(capsys, "show", "2", code=2)


def test_prune_keeps_the_newest_sound_ones(saved: list[Saved], capsys: pytest.CaptureFixture[str]) -> None:
    flip(saved[0].path)
    text = told(capsys, "prune", "--keep", "1")
    assert names(text) == [saved[0].path.name, saved[2].path.name]
    assert [each.path for each in CheckpointFolder(saved[0].path.parent, 10).list()] == [saved[1].path]
    assert told(capsys, "prune", "--keep", "1") == "", "there is nothing left to delete"


def test_prune_keeps_as_many_as_the_settings_unless_told_and_never_none(
    saved: list[Saved], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(capsys, "prune") == "", "three are kept by default"
    monkeypatch.setenv("FRESHET_CHECKPOINT__KEEP", "2")
    assert names(told(capsys, "prune")) == [saved[2].path.name]
    assert names(told(capsys, "prune", "--keep", "0")) == [saved[1].path.name]
    assert saved[0].path.exists()


def test_prune_deletes_nothing_when_nothing_is_sound(saved: list[Saved], capsys: pytest.CaptureFixture[str]) -> None:
    for each in saved:
        flip(each.path)
    assert "no checkpoint in" in told(capsys, "prune", "--keep", "1", code=2)
    assert all(each.path.exists() for each in saved)


def test_prune_leaves_what_another_version_wrote(saved: list[Saved], capsys: pytest.CaptureFixture[str]) -> None:
    header = saved[0].header
    assert header
    other = CheckpointFolder(saved[0].path.parent, 10).save({}, replace(header, format=FORMAT + 1)).path
    assert names(told(capsys, "prune", "--keep", "1")) == [saved[1].path.name, saved[2].path.name]
    assert other.exists()
    assert f"format {FORMAT + 1}, but this version reads format {FORMAT}" in " ".join(told(capsys, code=1).split())


class SavedMeanwhile(CheckpointFolder):
    """A folder in which a worker saves, and drops the oldest, right after it was looked at."""

    def list(self) -> list[Saved]:
        found = super().list()
        newest = self.path / f"checkpoint-{found[0].serial + 1:010}.pt"
        newest.write_bytes(found[0].path.read_bytes())
        found[-1].path.unlink()
        return found


def test_prune_never_deletes_what_a_running_worker_saves_meanwhile(saved: list[Saved]) -> None:
    folder = SavedMeanwhile(saved[0].path.parent, 10)
    assert prune_checkpoints(folder, Console(), 1) == 0
    there = sorted(path.name for path in folder.path.glob("*.pt"))
    assert there == [saved[0].path.name, "checkpoint-0000000004.pt"]


@pytest.mark.parametrize("action", ["list", "show", "verify", "prune"])
def test_an_empty_folder_is_told(folder: Path, capsys: pytest.CaptureFixture[str], action: str) -> None:
    assert told(capsys, action, code=2).startswith("error: ")


def test_what_is_no_checkpoint_is_left_alone(saved: list[Saved], capsys: pytest.CaptureFixture[str]) -> None:
    others = [saved[0].path.with_name(name) for name in ("notes.txt", "lock", "checkpoint-0000000009.tmp")]
    for other in others:
        other.write_text("mine")
    told(capsys, "prune", "--keep", "1")
    assert all(other.read_text() == "mine" for other in others)
