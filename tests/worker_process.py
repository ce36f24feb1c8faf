"""The worker as users run it: a process of its own, with its settings in the environment."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from tests.waiting import eventually
from worker.checkpoint import CheckpointFolder, Saved

SECRET_MARK = "s3cr"  # every password in the tests has it, and nothing that a worker may print

BASE = {
    "FRESHET_HTTP__PORT": "0",
    "FRESHET_LOG__FORMAT": "json",
    "FRESHET_RUNTIME__DEVICE": "cpu",
    "FRESHET_MODEL__DIM": "16",
    "FRESHET_MODEL__HISTORY": "10",
    "FRESHET_MODEL__NEGATIVES": "32",
    "FRESHET_MODEL__BATCH_SIZE": "64",
    "FRESHET_PUBLISH__HEARTBEAT_S": "0.1",
    "FRESHET_PUBLISH__ITEM_INTERVAL_S": "0.1",
}


class WorkerProcess:
    """`python -m worker` on a topic, with its checkpoints and its log in `home`."""

    def __init__(self, home: Path, bootstrap_servers: str, topic: str, redis_url: str, **settings: object) -> None:
        self.home, self.redis_url = home, redis_url
        home.mkdir(parents=True, exist_ok=True)
        self.settings = BASE | {
            "FRESHET_KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers,
            "FRESHET_KAFKA__TOPICS": topic,
            "FRESHET_REDIS__URL": redis_url,
            "FRESHET_CHECKPOINT__DIR": str(home / "checkpoints"),
        }
        self.settings |= {f"FRESHET_{name.upper()}": str(value) for name, value in settings.items()}
        self.log_path = home / "log.jsonl"
        self.process: subprocess.Popen[bytes] | None = None
        self._log_from = 0

    def start(self, *arguments: str) -> Self:
        """Start it; does not wait."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FRESHET_")}
        self._log_from = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "worker", *arguments], env=inherited | self.settings, stdout=log, stderr=log
            )
        return self

    @property
    def log(self) -> str:
        """What this process has logged since its last start."""
        with self.log_path.open() as file:
            file.seek(self._log_from)
            return file.read()

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The lines of the log with this event."""
        whole = self.log[: self.log.rfind("\n") + 1]  # the last line may still be on its way
        lines = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    @property
    def port(self) -> int:
        """Of its health and metrics."""
        found = eventually(lambda: re.search(r'"port": (\d+)', self.log), 60, self.describe)
        return int(found.group(1))

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def wait_ready(self) -> Self:
        """Until /readyz says so."""
        eventually(lambda: self.get("/readyz")[0] == 200, 60, self.describe)
        return self

    def reasons(self) -> dict[str, str]:
        """What speaks against being ready, as /readyz says."""
        return {each["reason"]: each["message"] for each in json.loads(self.get("/readyz")[1])["reasons"]}

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have these labels; 0 where there are none."""
        families = text_string_to_metric_families(self.get("/metrics")[1])
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def heartbeat(self) -> dict[str, str]:
        """The newest one in Redis."""
        with Redis.from_url(self.redis_url, decode_responses=True) as client:
            return dict(client.hgetall(f"{self.prefix}:worker"))  # type: ignore[arg-type]

    @property
    def prefix(self) -> str:
        """Of its keys."""
        return self.settings.get("FRESHET_REDIS__PREFIX", "rec")

    def wait_read(self, records: int) -> dict[str, str]:
        """Until a heartbeat of this process tells that so many records were read; returns it."""

        def read() -> dict[str, str] | None:
            if self.process is None or self.process.poll() is not None:
                raise RuntimeError(self.describe())
            beat = self.heartbeat()
            own = beat.get("writer", "").endswith(f":{self.process.pid}")
            return beat if own and int(beat.get("events_read", -1)) >= records else None

        return eventually(read, 120, self.describe)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """SIGTERM, and wait; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout_s: float = 60) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def checkpoints(self) -> list[Saved]:
        """Newest first."""
        return CheckpointFolder(Path(self.settings["FRESHET_CHECKPOINT__DIR"]), 3).list()

    def command(self, *arguments: str) -> str:
        """What another command of the worker prints under the same settings."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FRESHET_")}
        command = [sys.executable, "-m", "worker", *arguments]
        done = subprocess.run(
            command, env=inherited | self.settings, capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout + done.stderr

    def describe(self) -> str:
        """What a failed wait shows."""
        state = "not started" if self.process is None else f"exit code {self.process.poll()}"
        return f"worker: {state}; log:\n{self.log[-6000:]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
