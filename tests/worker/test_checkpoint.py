"""Checkpoint files: whole or not used at all."""

import hashlib
import io
import json
import os
import resource
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker.checkpoint import FORMAT, CheckpointError, CheckpointFolder, Header, load
from worker.source import Partition


def header(records: int = 7) -> Header:
    at = [("clicks", 0, records + 3)]
    ids = {"clicks": "a topic's id"}
    return Header(FORMAT, 1_700_000_000_000, 12, records, at, {"dim": 8}, {"learned": records}, ids)


def state(value: int = 1) -> dict[str, object]:
    return {"weights": torch.full((50, 8), float(value)), "nested": {"list": [1, "ü", None], "big": 2**70}}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CheckpointFolder]:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    folder.lock()
    yield folder
    folder.unlock()


def test_what_was_saved_is_loaded_with_its_positions(folder: CheckpointFolder) -> None:
    saved = folder.save(state(), header())
    again, content = load(saved.path)
    assert again.header == saved.header
    assert again.header is not None
    assert again.header.positions_by_partition() == {Partition("clicks", 0): 10}
    assert again.header.topic_ids == {"clicks": "a topic's id"}
    assert torch.equal(content["weights"], state()["weights"])  # type: ignore[arg-type]
    assert content["nested"] == state()["nested"]


def test_the_newest_are_kept_and_the_newest_is_used(folder: CheckpointFolder) -> None:
    for n in range(1, 6):
        folder.save(state(n), header(n))
    kept = folder.list()
    assert [one.serial for one in kept] == [5, 4, 3]
    found = folder.newest_sound()
    assert found is not None
    assert found[0].header is not None
    assert found[0].header.records == 5


def test_an_empty_folder_has_none(folder: CheckpointFolder) -> None:
    assert folder.newest_sound() is None
    assert folder.list() == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_one_flipped_bit_anywhere_is_found_and_the_one_before_is_used(
    folder: CheckpointFolder, data: st.DataObject
) -> None:
    """M1: never a mix of two checkpoints, and never a damaged one."""
    folder.save(state(1), header(1))
    newest = folder.save(state(2), header(2)).path
    content = bytearray(newest.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    newest.write_bytes(content)
    found = folder.newest_sound()
    assert found is not None
    assert found[0].header == header_read_from(found[0].path)
    assert found[0].header is not None
    assert found[0].header.positions == [("clicks", 0, 4)]
    assert float(found[1]["weights"][0, 0]) == 1.0
    with pytest.raises(CheckpointError, match=newest.name):
        load(newest)


def header_read_from(path: Path) -> Header | None:
    return load(path)[0].header


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.9999))
def test_a_file_cut_anywhere_is_found(folder: CheckpointFolder, share: float) -> None:
    folder.save(state(1), header(1))
    newest = folder.save(state(2), header(2)).path
    os.truncate(newest, int(share * newest.stat().st_size))
    found = folder.newest_sound()
    assert found is not None
    assert float(found[1]["weights"][0, 0]) == 1.0


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch hostile-checkpoint-ran",)


def test_a_checkpoint_that_would_run_code_is_refused(folder: CheckpointFolder) -> None:
    path = folder.save({"state": Hostile()}, header()).path
    with pytest.raises(CheckpointError, match="more than tensors and plain data"):
        load(path)
    assert not Path("hostile-checkpoint-ran").exists()


def forged(path: Path, payload: bytes, without: str = "", **fields: object) -> Path:
    """A checkpoint file with sound checksums, whatever is in it."""
    sums = {"payload_bytes": len(payload), "payload_sha256": hashlib.sha256(payload).hexdigest()}
    whole = asdict(header()) | sums | fields
    text = json.dumps({name: value for name, value in whole.items() if name != without}).encode()
    path.write_bytes(payload + text + struct.pack("<QI8s", len(text), zlib.crc32(text), b"FRESHET\n"))
    return path


def payload_of(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_a_forged_file_is_as_good_as_one_of_ours(tmp_path: Path) -> None:
    assert load(forged(tmp_path / "checkpoint-1.pt", payload_of({"a": 1})))[1] == {"a": 1}


def test_a_header_from_before_topics_had_ids_names_none(tmp_path: Path) -> None:
    saved, _ = load(forged(tmp_path / "checkpoint-1.pt", payload_of({}), without="topic_ids"))
    assert saved.header is not None
    assert saved.header.topic_ids == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": 7},
        {"positions": [[1, 2]]},
        {"positions": [["clicks", "zero", 1]]},
        {"topic_ids": 7},
        {"format": None},
        {"format": [1]},
        {"unknown": 1},
    ],
)
def test_a_header_that_is_none_is_refused(folder: CheckpointFolder, fields: dict[str, object]) -> None:
    path = forged(folder.path / "checkpoint-1.pt", payload_of({}), **fields)
    with pytest.raises(CheckpointError, match=path.name):
        load(path)
    assert folder.list()[0].problem
    assert folder.newest_sound() is None


def test_an_archive_that_grows_when_it_is_read_is_refused(tmp_path: Path) -> None:
    """A bomb: a small file that would fill the memory."""
    packed = io.BytesIO()
    plain = zipfile.ZipFile(io.BytesIO(payload_of(torch.zeros(5_000_000))))
    with plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    path = forged(tmp_path / "checkpoint-1.pt", packed.getvalue())
    assert path.stat().st_size < 100_000
    with pytest.raises(CheckpointError, match="unpacks to more than its size"):
        load(path)


def test_a_tensor_that_repeats_a_few_bytes_for_ever_is_refused(tmp_path: Path) -> None:
    path = forged(tmp_path / "checkpoint-1.pt", payload_of({"weights": torch.zeros(1).expand(10**12)}))
    with pytest.raises(CheckpointError, match="larger than the file"):
        load(path)


def test_another_format_is_refused_by_name(folder: CheckpointFolder) -> None:
    other = header()
    object.__setattr__(other, "format", 99)
    path = folder.save(state(), other).path
    with pytest.raises(CheckpointError, match="format 99, but this version reads format 2"):
        load(path)
    assert "format 99" in folder.list()[0].problem


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel refuses to write files past `size` bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_during_a_save_leaves_what_was_there(folder: CheckpointFolder) -> None:
    """M8."""
    folder.save(state(1), header(1))
    with largest_file(2000), pytest.raises(OSError, match="File too large"):
        folder.save(state(2), header(2))
    assert not list(folder.path.glob("*.tmp"))
    found = folder.newest_sound()
    assert found is not None
    assert float(found[1]["weights"][0, 0]) == 1.0
    folder.save(state(3), header(3))
    assert folder.list()[0].header is not None


def test_a_disk_that_fills_at_any_byte_is_an_os_error_and_takes_no_room(folder: CheckpointFolder) -> None:
    """torch has words of its own for it, which nobody who writes files knows."""
    big = {"weights": torch.zeros(100_000), "many": [torch.zeros(1000) for _ in range(50)]}
    size = folder.save(big, header(1)).bytes
    for limit in (0, 100, 5000, size // 4, size // 2, 420_000, size - 2000, size - 300, size - 1):
        with largest_file(limit), pytest.raises(OSError, match="File too large"):
            folder.save(big, header(2))
        assert [path.name for path in sorted(folder.path.iterdir())] == ["checkpoint-0000000001.pt", "lock"]
    assert folder.save(big, header(3)).bytes >= size


def test_a_full_disk_does_not_keep_a_worker_from_its_folder(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, 3)
    with largest_file(0):
        folder.lock()
    with pytest.raises(CheckpointError, match="in use by another process"):
        CheckpointFolder(tmp_path, 3).lock()
    folder.unlock()


def test_a_vanished_folder_is_an_error_of_the_save_and_not_of_the_process(folder: CheckpointFolder) -> None:
    folder.path.rename(folder.path.with_name("elsewhere"))
    with pytest.raises(OSError, match="No such file"):
        folder.save(state(), header())


def test_what_a_killed_save_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-0000000007.tmp").write_bytes(b"half")
    folder = CheckpointFolder(tmp_path, keep=3)
    folder.lock()
    assert folder.save(state(), header()).serial == 1
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["checkpoint-0000000001.pt", "lock"]
    folder.unlock()


HOLD = """
import sys, pathlib
from worker.checkpoint import CheckpointFolder
folder = CheckpointFolder(pathlib.Path(sys.argv[1]), 3)
folder.lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_says_by_whom(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=f"in use by process {holder.pid} on"):
            CheckpointFolder(tmp_path, 3).lock()
        holder.kill()
        holder.wait()
    folder = CheckpointFolder(tmp_path, 3)
    folder.lock()  # the lock went with the process
    folder.unlock()


def test_what_a_killed_save_left_and_cannot_be_removed_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-0000000001.tmp").mkdir()
    with pytest.raises(CheckpointError, match=f"the checkpoint folder {tmp_path} cannot be used: "):
        CheckpointFolder(tmp_path, keep=1).lock()


def test_a_folder_that_is_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be used"):
        CheckpointFolder(tmp_path / "file", 3).lock()
