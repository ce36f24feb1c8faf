"""A worker is told to stop, at any moment and in any weather; and one that hangs is told from one that waits."""

import fcntl
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGSTOP, SIGTERM
from typing import Any

import pytest

from replay.local_stack import Broker, RedisServer, create_topic
from tests.clicks import MakeWorker, Send, clicks, send_all
from tests.faults.own_kafka import assert_learned, saved_position
from tests.waiting import eventually
from tests.worker_process import WorkerProcess
from worker.checkpoint import load

pytestmark = [pytest.mark.faults, pytest.mark.integration]

TOTAL = 5000
FIRST = 4000  # are sent before the stop, the rest after it
SLOW = pytest.mark.slow
_topics = itertools.count()


@dataclass(slots=True)
class Stage:
    """A worker in mid-life on servers that may be broken."""

    worker: WorkerProcess
    broker: Broker
    redis: RedisServer
    topic: str
    sent: int = 0

    def send(self, count: int) -> None:
        """The next `count` of the clicks that the whole test sends."""
        send_all(self.broker.bootstrap_servers, self.topic, clicks(TOTAL)[0][self.sent : self.sent + count])
        self.sent += count

    def heal(self) -> None:
        """Everything is there again."""
        for server in (self.broker, self.redis):
            if server.running:
                server.resume()
            else:
                server.start()


@pytest.fixture
def stage(make_worker: MakeWorker, breakable_broker: Broker, own_redis: RedisServer) -> Iterator[Stage]:
    topic = f"stopping-{next(_topics)}"
    create_topic(breakable_broker.bootstrap_servers, topic)
    at = {"topic": topic, "bootstrap_servers": breakable_broker.bootstrap_servers, "redis_url": own_redis.url}
    # slow enough to be met in mid-stream; saves are frequent only where a test asks for that
    slow = {"kafka__max_poll_records": 10, "checkpoint__every_events": 1_000_000, "runtime__grace_s": 10}
    stage = Stage(make_worker(**at, **slow), breakable_broker, own_redis, topic)
    yield stage
    stage.heal()


def idle(stage: Stage) -> None:
    """Everything is read."""
    stage.worker.start().wait_ready()
    stage.send(FIRST)
    stage.worker.wait_read(FIRST)


def in_mid_stream(stage: Stage) -> None:
    """There is more to read than has been read."""
    stage.send(FIRST)
    stage.worker.start().wait_read(100)
    stage.worker.signal(SIGSTOP)
    assert int(stage.worker.heartbeat()["events_read"]) < FIRST - 500


def while_it_saves(stage: Stage) -> None:
    """A file is half written."""
    stage.worker.settings["FRESHET_CHECKPOINT__EVERY_EVENTS"] = "10"
    stage.send(FIRST)
    stage.worker.start().wait_read(100)
    folder = stage.worker.home / "checkpoints"

    def caught() -> bool:
        if not list(folder.glob("*.tmp")):
            return False
        stage.worker.signal(SIGSTOP)
        if list(folder.glob("*.tmp")):
            return True
        stage.worker.signal(SIGCONT)
        return False

    eventually(caught, 60, "a save in mid-write")


def before_the_first_turn(stage: Stage) -> None:
    """It has a checkpoint, and has just begun to start from it."""
    idle(stage)
    assert stage.worker.stop() == 0
    stage.worker.start()
    eventually(lambda: stage.worker.logged("listening"), 60, stage.worker.describe)


def away(*names: str, kill: bool = False) -> Callable[[Stage], None]:
    """Servers are killed, or accept connections and do not answer any more."""

    def break_them(stage: Stage) -> None:
        idle(stage)
        for name in names:
            server = getattr(stage, "broker" if name == "kafka" else name)
            server.kill() if kill else server.pause()
        eventually(lambda: set(names) <= stage.worker.reasons().keys(), 60, stage.worker.describe)

    return break_them


MOMENTS = [
    pytest.param(idle, id="idle", marks=SLOW),
    pytest.param(in_mid_stream, id="in mid-stream"),
    pytest.param(while_it_saves, id="while it saves"),
    pytest.param(before_the_first_turn, id="before the first turn", marks=SLOW),
    pytest.param(away("kafka"), id="Kafka silent", marks=SLOW),
    pytest.param(away("kafka", kill=True), id="Kafka killed", marks=[SLOW, pytest.mark.apache_kafka]),
    pytest.param(away("redis"), id="Redis silent", marks=SLOW),
    pytest.param(away("redis", kill=True), id="Redis killed", marks=SLOW),
    pytest.param(away("kafka", "redis"), id="both silent", marks=SLOW),
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stop_at_any_moment_saves_what_was_read_and_loses_nothing(
    stage: Stage, moment: Callable[[Stage], None]
) -> None:
    """K10: SIGTERM. It ends with 0 by itself, its checkpoint is sound, and the next start goes on from there."""
    moment(stage)
    stage.worker.signal(SIGTERM)
    stage.worker.signal(SIGCONT)
    assert_goes_on_after_the_stop(stage)


@pytest.mark.parametrize(
    "signals",
    [pytest.param((SIGINT,), id="Ctrl-C"), pytest.param((SIGTERM, SIGTERM, SIGINT, SIGTERM), id="impatient")],
)
def test_ctrl_c_and_impatience_are_stops_like_others(stage: Stage, signals: tuple[signal.Signals, ...]) -> None:
    """K10: SIGINT; and SIGTERM again and again while it is stopping."""
    in_mid_stream(stage)
    process = stage.worker.process
    assert process is not None
    stage.worker.signal(signals[0])
    stage.worker.signal(SIGCONT)
    again = itertools.cycle(signals[1:] or [SIGCONT])
    eventually(lambda: process.send_signal(next(again)) or process.poll() is not None, 60, stage.worker.describe)
    assert_goes_on_after_the_stop(stage)


def assert_goes_on_after_the_stop(stage: Stage) -> None:
    """The worker ends with 0; what it has saved fits together; the next one reads the rest."""
    assert stage.worker.wait() == 0, stage.worker.describe()
    assert "Traceback" not in stage.worker.log
    records = load(stage.worker.checkpoints()[0].path)[1]["ingest"]["records"]
    assert saved_position(stage.worker, stage.topic) == records
    assert not list((stage.worker.home / "checkpoints").glob("*.tmp"))
    stage.heal()
    stage.send(TOTAL - stage.sent)
    stage.worker.start().wait_read(TOTAL)
    assert stage.worker.stop() == 0
    _, users, items = clicks(TOTAL)
    assert_learned(stage.worker, users, items)


class UnreadWorker(WorkerProcess):
    """Logs into a pipe that somebody reads, or does not."""

    def __init__(self, *where: Any, **settings: object) -> None:
        super().__init__(*where, **settings)
        self.read = threading.Event()
        self.read.set()
        self._fifo, self._shown = self.home / "log.fifo", self.home / "log.jsonl"
        self.log_path = self._fifo
        os.mkfifo(self._fifo)
        self._shown.touch()
        threading.Thread(target=self._copy, daemon=True).start()

    def _copy(self) -> None:
        # open for writing too: there is no end of file when the worker ends
        pipe = os.open(self._fifo, os.O_RDWR)
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
        while self.read.wait():
            with self._shown.open("ab") as shown:
                shown.write(os.read(pipe, 1024))

    @property
    def log(self) -> str:
        return self._shown.read_text()


def test_a_loop_that_hangs_is_told_from_one_that_waits(
    tmp_path: Path, broker: Broker, topic: str, redis_url: str, send: Send
) -> None:
    """K11: nobody reads the log, the pipe is full, and the loop is stuck in the middle of a line: no longer alive."""
    settings = {"http__stale_after_s": 2, "checkpoint__every_events": 1, "checkpoint__every_s": 0.05}
    with UnreadWorker(tmp_path / "worker", broker.bootstrap_servers, topic, redis_url, **settings) as worker:
        worker.start().wait_ready()
        send(clicks(100)[0])
        worker.wait_read(100)
        port = worker.port
        worker.read.clear()
        fill = itertools.count(1)

        def hangs() -> bool:
            send(clicks(1, seed=next(fill))[0])
            return worker.get("/healthz")[0] == 503

        eventually(hangs, 60, worker.describe)
        assert "the loop has not turned" in worker.reasons()["loop"]
        assert worker.metric("freshet_loop_age_seconds") >= 2
        assert worker.port == port
        worker.read.set()
        eventually(lambda: worker.get("/healthz")[0] == 200, 60, worker.describe)
        worker.wait_ready()
        worker.wait_read(100 + next(fill) - 1)
        assert worker.stop() == 0
