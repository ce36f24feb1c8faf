"""`python -m replay` as its users run it: in a process of its own, against a real broker."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from replay.__main__ import main
from replay.local_stack import Broker, free_port
from tests.replay.kafka_reading import read_all
from tests.waiting import eventually

pytestmark = pytest.mark.integration
LINES = "196\t242\t3\t881250949\n186\t302\t4\t891717742\n22\t377\t1\t878887116\n244\t51\t5\t880606923\n"


def environment(**settings: str) -> dict[str, str]:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("FRESHET_")}
    return inherited | {f"FRESHET_KAFKA__{name}": text for name, text in settings.items()}


def replay(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "replay", *arguments]
    return subprocess.run(
        command, env=environment(**settings), capture_output=True, text=True, timeout=120, check=False
    )


def refused(*arguments: str, **settings: str) -> str:
    """What a replay that ends with exit code 1 says: one line, no traceback."""
    done = replay(*arguments, **settings)
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stdout == ""
    return done.stderr


@contextmanager
def running(*arguments: str, **settings: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "replay", *arguments]
    with subprocess.Popen(command, env=environment(**settings), stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def events(broker: Broker, topic: str) -> list[dict[str, Any]]:
    return [json.loads(record.value) for record in read_all(broker.bootstrap_servers, topic)]


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    path = tmp_path / "u.data"
    path.write_text(LINES)
    return path


@pytest.fixture
def kafka(broker: Broker, topic: str) -> dict[str, str]:
    return {"BOOTSTRAP_SERVERS": broker.bootstrap_servers, "TOPICS": f"{topic},another"}


def test_movielens_arrives_in_time_order_as_the_wire_contract_says(
    broker: Broker, topic: str, ratings: Path, kafka: dict[str, str]
) -> None:
    done = replay("movielens", "--path", str(ratings), **kafka)
    assert done.returncode == 0, done.stderr
    assert "4 events sent and acknowledged" in done.stderr
    records = read_all(broker.bootstrap_servers, topic)
    assert [record.key for record in records] == [b"22", b"244", b"196", b"186"]
    assert json.loads(records[0].value) == {
        "event_id": "u-0",
        "user_id": "22",
        "item_id": "377",
        "event_type": "click",
        "timestamp": 878887116000,
        "value": 1.0,
    }


def test_a_part_is_chosen_by_number_time_rating_and_count(
    broker: Broker, topic: str, ratings: Path, kafka: dict[str, str]
) -> None:
    for arguments in (
        ["--start-at", "3"],
        ["--start-at", "1997-12-04T11:00:00Z", "--limit", "1"],
        ["--min-rating", "4"],
    ):
        assert replay("movielens", "--path", str(ratings), *arguments, **kafka).returncode == 0
    assert [event["event_id"] for event in events(broker, topic)] == ["u-3", "u-2", "u-1", "u-3"]


def test_standard_output_gets_the_records_that_kafka_would(
    broker: Broker, topic: str, ratings: Path, kafka: dict[str, str]
) -> None:
    assert replay("movielens", "--path", str(ratings), **kafka).returncode == 0
    done = replay("movielens", "--path", str(ratings), "--stdout", BOOTSTRAP_SERVERS="nowhere.invalid:1")
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line) for line in done.stdout.splitlines()] == events(broker, topic)


def test_standard_output_that_nobody_reads_any_more_is_an_error_in_one_line(tmp_path: Path) -> None:
    command = f"{sys.executable} -m replay synthetic --events 200000 --stdout | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "replay: the output cannot be written: Broken pipe\n"


def test_a_loop_goes_round_with_other_ids(broker: Broker, topic: str, ratings: Path, kafka: dict[str, str]) -> None:
    done = replay("movielens", "--path", str(ratings), "--loop", "--limit", "6", "--event-type", "view", **kafka)
    assert done.returncode == 0, done.stderr
    found = events(broker, topic)
    assert [event["event_id"] for event in found] == ["u-0-0", "u-0-1", "u-0-2", "u-0-3", "u-1-0", "u-1-1"]
    assert {event["event_type"] for event in found} == {"view"}


def test_a_file_with_a_column_map(broker: Broker, topic: str, tmp_path: Path, kafka: dict[str, str]) -> None:
    path = tmp_path / "shop.tsv"
    path.write_text("who\twhat\thow\n用户\titem one\tpurchase\n")
    done = replay("file", str(path), "--columns", "user_id=who,item_id=what,event_type=how", **kafka)
    assert done.returncode == 0, done.stderr
    expected = {"event_id": "shop-0", "user_id": "用户", "item_id": "item one", "event_type": "purchase"}
    assert events(broker, topic) == [expected]


def test_a_synthetic_stream_into_a_topic_that_it_creates(broker: Broker, topic: str, kafka: dict[str, str]) -> None:
    name = f"{topic}-new"
    arguments = ["--events", "500", "--create-topic", "--partitions", "2", "--topic", name, "--compression", "none"]
    done = replay("synthetic", *arguments, **kafka)
    assert done.returncode == 0, done.stderr
    records = read_all(broker.bootstrap_servers, name)
    assert len(records) == 500
    assert {record.partition for record in records} == {0, 1}


def test_items_are_described_first_where_a_topic_for_them_is_named(
    broker: Broker, topic: str, tmp_path: Path, kafka: dict[str, str]
) -> None:
    (tmp_path / "u.data").write_text(LINES)
    movie = "242|Kolya (1996)|24-Jan-1997||http://x|0|0|0|0|0|1|0|0|0|0|0|0|0|0|0|0|0|0|0\n"
    (tmp_path / "u.item").write_bytes(movie.encode("latin-1"))
    name = f"{topic}-items"
    done = replay("movielens", "--path", str(tmp_path), "--items-topic", name, "--create-topic", **kafka)
    assert done.returncode == 0, done.stderr
    (record,) = read_all(broker.bootstrap_servers, name)
    described = json.loads(record.value)
    assert record.key == b"242"
    assert described.pop("timestamp") == pytest.approx(record.timestamp, abs=60_000)
    attributes = {"genres": ["Comedy"], "year": 1996}
    assert described == {"item_id": "242", "title": "Kolya", "attributes": attributes, "available": True}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_replay_flushes_and_says_where_to_go_on(
    broker: Broker, topic: str, kafka: dict[str, str], number: signal.Signals
) -> None:
    with running("synthetic", "--events", "1000000", "--rate", "500", **kafka) as process:
        eventually(lambda: events(broker, topic))
        process.send_signal(number)
        last = process.communicate(timeout=60)[1].splitlines()[-1]
        assert process.returncode == 130
    count = len(events(broker, topic))
    assert last.startswith(f"replay: interrupted; {count} events sent and acknowledged")
    assert last.endswith(f"--start-at {count} goes on from there")


def test_a_broker_that_is_not_there_is_one_line_in_bounded_time() -> None:
    message = refused("synthetic", "--events", "10", BOOTSTRAP_SERVERS=f"127.0.0.1:{free_port()}")
    assert "cannot be reached" in message


def test_a_topic_that_is_not_there_is_one_line(kafka: dict[str, str]) -> None:
    assert "no topic 'nowhere'" in refused("synthetic", "--topic", "nowhere", **kafka)


def test_data_that_cannot_be_read_is_one_line_that_names_the_file_and_the_line(
    tmp_path: Path, kafka: dict[str, str]
) -> None:
    path = tmp_path / "u.data"
    path.write_text(LINES + "1\t2\n")
    assert f"{path}, line 5" in refused("movielens", "--path", str(path), **kafka)
    path = tmp_path / "events.csv"
    path.write_text("user,item,ts\nu,i,never\n")
    assert f"{path}, line 2" in refused("file", str(path), **kafka)
    assert "missing.csv" in refused("file", str(tmp_path / "missing.csv"), **kafka)


def test_a_value_that_the_wire_contract_forbids_is_one_line(tmp_path: Path, kafka: dict[str, str]) -> None:
    path = tmp_path / "events.csv"
    path.write_text("user,item,value\nu,i,1e300\n")
    assert "interaction 0: value must be finite in 32 bits" in refused("file", str(path), **kafka)


def test_a_speedup_needs_times(tmp_path: Path, kafka: dict[str, str]) -> None:
    path = tmp_path / "events.csv"
    path.write_text("user,item\nu,i\n")
    assert "timestamps" in refused("file", str(path), "--speedup", "10", **kafka)
    assert "timestamps" in refused("file", str(path), "--start-at", "2024-01-01", **kafka)


@pytest.mark.parametrize("arguments", [
    [],
    ["nothing"],
    ["movielens", "--version", "2k"],
    ["movielens", "--rate", "0"],
    ["movielens", "--rate", "10", "--speedup", "2"],
    ["movielens", "--limit", "-1"],
    ["movielens", "--start-at", "yesterday"],
    ["synthetic", "--events", "many"],
    ["file"],
    ["file", "x", "--columns", "user=a"],
    ["synthetic", "--compression", "rar"],
])  # fmt: skip
def test_wrong_arguments_are_exit_code_2_and_say_what_is_allowed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "usage:" in said
    assert "invalid _" not in said


def test_help_names_the_variables(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["movielens"], ["file"], ["synthetic"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--help"])
        assert ended.value.code == 0
        assert "FRESHET_KAFKA__BOOTSTRAP_SERVERS" in capsys.readouterr().out
