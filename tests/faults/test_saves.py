"""M1: a save that is killed anywhere leaves a whole checkpoint, with its own positions."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from worker.checkpoint import CheckpointFolder

pytestmark = [pytest.mark.faults, pytest.mark.quick]

Die = Callable[..., int]


@pytest.fixture
def die(tmp_path: Path) -> Iterator[Die]:
    """Has a process save checkpoint number `records` and be killed at a byte or an operation; by which signal."""
    command = [sys.executable, "-m", "tests.faults.dying_save", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as saver:
        assert saver.stdin
        assert saver.stdout

        def ask(**how: int) -> int:
            print(json.dumps(how), file=saver.stdin, flush=True)
            return -int(saver.stdout.readline())

        yield ask
        saver.stdin.close()


def newest(path: Path) -> int:
    """The number of the newest whole checkpoint; its content and its positions are of one moment."""
    found = CheckpointFolder(path, keep=2).newest_sound()
    assert found
    saved, state = found
    assert saved.header
    number = state["records"]
    assert (state["weights"] == number).all()
    assert saved.header.positions == [("clicks", 0, number)]
    return int(number)


def test_a_save_that_is_killed_at_any_byte_leaves_the_checkpoint_before_it(tmp_path: Path, die: Die) -> None:
    assert die(records=1) == 0
    size = (tmp_path / "checkpoint-0000000001.pt").stat().st_size
    places = [0, 1, 64, 1000, 4096, size // 4, size // 2, size * 3 // 4, size - 700, size - 200, size - 20, size - 1]
    for place in places:
        assert die(records=2, bytes=place) == signal.SIGXFSZ
        assert (tmp_path / "checkpoint-0000000002.tmp").stat().st_size <= place
        assert newest(tmp_path) == 1
    assert die(records=2, bytes=size) == 0, "one byte more would have been one too many"
    assert newest(tmp_path) == 2


def test_a_save_that_is_killed_between_any_two_file_operations_leaves_one_of_the_two(tmp_path: Path, die: Die) -> None:
    for records in (1, 2):
        assert die(records=records) == 0
    operation, seen = 1, []
    while die(records=3, operation=operation) == signal.SIGKILL:
        seen.append(newest(tmp_path))
        if seen[-1] == 3:  # to be seen once more from the beginning
            max(tmp_path.glob("checkpoint-*.pt")).unlink()
        operation += 1
    assert newest(tmp_path) == 3
    assert len(seen) >= 5
    assert seen == sorted(seen), "once it is there it stays"
    assert set(seen) == {2, 3}


def test_what_killed_saves_left_is_cleaned_up_by_the_next_start(tmp_path: Path, die: Die) -> None:
    assert die(records=1) == 0
    assert die(records=2, bytes=50_000) == signal.SIGXFSZ
    folder = CheckpointFolder(tmp_path, keep=2)
    folder.lock()
    assert not list(tmp_path.glob("*.tmp"))
    folder.unlock()
    assert die(records=3) == 0
    assert newest(tmp_path) == 3
