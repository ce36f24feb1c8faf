"""The demo, whole: in a process of its own, on real servers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis

from replay.datasets import movielens
from replay.local_stack import Broker
from tests.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.slow]
REQUIRED = [
    "events_read",
    "events_learned",
    "events_rejected",
    "recall_at_10",
    "recall_at_10_last_half",
    "ndcg_at_10",
    "mrr_at_10",
    "popularity_recall_at_10",
    "freshness_p50_ms",
    "freshness_p99_ms",
    "events_per_s",
    "checkpoints",
    "users_published",
    "items_published",
]


def processes_in(folder: Path) -> list[int]:
    """Processes whose working directory is in `folder`."""
    if not Path("/proc").is_dir():
        listed = subprocess.run(["lsof", "-a", "-d", "cwd", "-t", "+D", str(folder)], capture_output=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and (process / "cwd").readlink().is_relative_to(folder):
                found.append(int(process.name))
        except OSError:
            continue  # gone already, or somebody else's
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to run in, with the data that this machine has already."""
    cached = Path(".freshet/datasets").resolve()
    movielens.load(cache_dir=cached)
    (tmp_path / ".freshet").mkdir()
    (tmp_path / ".freshet" / "datasets").symlink_to(cached)
    return tmp_path


@contextmanager
def demo(folder: Path, *arguments: str, **settings: str) -> Iterator[subprocess.Popen[str]]:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("FRESHET_")}
    with subprocess.Popen(
        [sys.executable, "-m", "replay", "demo", *arguments],
        cwd=folder,
        env=inherited | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def test_it_ends_by_itself_with_a_report_leaves_no_process_and_runs_again(folder: Path) -> None:
    for _ in range(2):
        with demo(folder, "--limit", "2000", "--partitions", "2") as process:
            shown, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
        assert processes_in(folder) == []
        report = json.loads((folder / "reports" / "demo.json").read_text())
        assert [name for name in REQUIRED if not isinstance(report[name], int | float)] == []
        assert (report["events_sent"], report["events_read"], report["events_rejected"]) == (2000, 2000, 0)
        assert report["events_learned"] == 2000
        assert report["partitions"] == 2
        assert report["checkpoints"] >= 1
        dataset = movielens.load(cache_dir=folder / ".freshet" / "datasets")
        first = list(dataset.interactions())[:2000]
        assert report["users_published"] == len({event.user for event in first})
        assert report["items_published"] == len(dataset.items()), "described items are there before their first click"
        assert report["outside_freshness_samples"] > 0
        assert report["outside_freshness_missed"] == 0
        assert len(report["users"]) == 3
        for user in report["users"]:
            assert len(user["top"]) == 10
            assert not set(user["top"]) & set(user["last_clicks"])
            assert user["last_clicks"][0] in shown
        assert "Recall@10" in shown


def test_servers_that_the_environment_names_are_used_as_they_are(
    folder: Path, broker: Broker, redis_url: str, redis_client: Redis
) -> None:
    redis_client.set("demo:user:of-an-earlier-demo", "x")
    redis_client.set("somebody-elses", "x")
    settings = {"FRESHET_KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap_servers, "FRESHET_REDIS__URL": redis_url}
    with demo(folder, "--limit", "500", **settings) as process:
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert processes_in(folder) == []
    assert broker.running
    assert redis_client.get("somebody-elses") == b"x"
    assert redis_client.get("demo:user:of-an-earlier-demo") is None
    assert redis_client.exists("demo:meta")
    assert not (folder / ".freshet" / "demo" / "redis").exists()


@pytest.mark.parametrize(("moment", "number"), [
    ("starting the worker", signal.SIGINT),
    ("starting the worker", signal.SIGKILL),
    ("as fast as possible", signal.SIGINT),
    ("as fast as possible", signal.SIGTERM),
    ("events/s, to measure", signal.SIGINT),
    ("events/s, to measure", signal.SIGKILL),
])  # fmt: skip
def test_ended_at_any_moment_it_leaves_no_process(folder: Path, moment: str, number: signal.Signals) -> None:
    with demo(folder, "--limit", "4000") as process:
        assert process.stderr is not None
        assert any(moment in line for line in process.stderr)
        assert len(processes_in(folder)) > 1
        process.send_signal(number)
        assert process.wait(90) == (-9 if number == signal.SIGKILL else 130)
        eventually(lambda: not processes_in(folder), 30)


def test_a_second_demo_at_the_same_time_says_that_there_is_one(folder: Path) -> None:
    with demo(folder, "--limit", "4000") as first:
        assert first.stderr is not None
        first.stderr.readline()
        with demo(folder) as second:
            _, said = second.communicate(timeout=60)
        assert second.returncode == 1
        assert "another demo is running" in said
        first.send_signal(signal.SIGINT)
        assert first.wait(90) == 130
