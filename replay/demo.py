"""The demo: broker, Redis and worker as in production, MovieLens through all of it, and a report.

Servers that the environment names (FRESHET_KAFKA__BOOTSTRAP_SERVERS, FRESHET_REDIS__URL) are used as they
are; the others are started on this machine, with their data in `.freshet/demo`, and stopped again.
"""

import argparse
import fcntl
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rich.console import Console

from replay import kafka_client, progress, runner, worker_view
from replay.arguments import positive
from replay.datasets import Dataset, DatasetError, Interaction, movielens
from replay.datasets.base import titles
from replay.demo_report import DemoReport, Machine, UserSample, milliseconds, quantile_ms, show
from replay.kafka_client import KafkaUnavailableError
from replay.local_stack import KafkaBroker, LocalServer, StackError, start_broker, start_redis
from replay.pacing import FixedRate, Pacer, Unpaced
from replay.probe import Probe
from replay.producer import DeliveryError, EventProducer
from replay.runner import Outcome
from replay.stream import Selection
from replay.worker_view import Buckets, Items, Metrics, Vectors

FOLDER = Path(".freshet/demo")
REPORT = Path("reports/demo.json")
PREFIX = "demo"
PACED_RATE = 1000.0
PACED_EVENTS = 15_000
SAMPLED_USERS = 3
_COMPACTED = {"cleanup.policy": "compact"}
_SECTION = "FRESHET_"
_OFTEN = _SECTION + "CHECKPOINT__EVERY_EVENTS"
_GRACE_S = 40.0  # twice the worker's own
_READY_S = 120.0  # importing torch on a cold disk takes its time
_STALLED_S = 120.0  # a worker that reads nothing for so long is not going to
_SETTLED_S = 5.0  # after this long without news, what is missing is not coming
_POLL_S = 0.1
_TAIL = 5_000  # newest events among which the sampled users are looked for
_FEWEST_CLICKS = 5

Say = Callable[[str], None]


class DemoError(Exception):
    """The demo cannot go on; the message is for people."""


class WorkerProcess(LocalServer):
    """`python -m worker`, in a process of its own, configured by its environment."""

    name = "worker"

    def __init__(self, data_dir: Path, settings: dict[str, str]) -> None:
        super().__init__(data_dir, start_timeout_s=_READY_S)
        self.settings = settings

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "worker"]

    def environment(self) -> dict[str, str]:
        own = {
            "FRESHET_HTTP__HOST": "127.0.0.1",
            "FRESHET_HTTP__PORT": str(self.port),
            "FRESHET_CHECKPOINT__DIR": str(self.data_dir / "checkpoints"),
            "FRESHET_LOG__FORMAT": "json",
        }
        return dict(os.environ) | self.settings | own

    def stop(self, timeout_s: float = _GRACE_S) -> None:
        super().stop(timeout_s)

    def answers(self) -> bool:
        return worker_view.ready(self.http_url)[0]


@dataclass(frozen=True)
class Stack:
    """Everything that the demo talks to."""

    bootstrap_servers: str
    topic: str
    items_topic: str
    redis: Redis
    worker: WorkerProcess
    broker_name: str
    redis_name: str


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `demo` to the command line."""
    command = commands.add_parser("demo", help="the whole thing on this machine, with a report", description=__doc__)
    command.add_argument("--partitions", type=positive, default=1, metavar="N", help="of the topic (default: 1)")
    command.add_argument("--limit", type=positive, metavar="N", help="only the first N events")
    command.add_argument("--keep", action="store_true", help="stay up after the report, until Ctrl-C")
    command.add_argument("--report", type=Path, default=REPORT, metavar="FILE", help="default: %(default)s")
    command.set_defaults(run=run, verbose=False)


def run(options: argparse.Namespace) -> int:
    """Run the demo; its exit code."""
    console = Console(stderr=True)
    try:
        with _one_at_a_time(FOLDER):
            _demo(options, console)
    except (DemoError, StackError, DatasetError, KafkaUnavailableError, RedisError, OSError) as error:
        console.print(f"demo: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    return 0


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a lock, since two demos would wipe each other's data."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError(f"another demo is running in {folder}") from None
        yield


def _demo(options: argparse.Namespace, console: Console) -> None:
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    dataset = movielens.load(say=say)
    total = min(len(dataset), options.limit or len(dataset))
    with _stack(options.partitions, say) as stack:
        _describe(stack, dataset, say)
        figures = _Traffic(stack, dataset, say).send(total)
        if not options.keep:
            say("stopping the worker, which saves and publishes what is left …")
            stack.worker.stop()
        report = _report(stack, dataset, options.partitions, figures, time.monotonic() - began)
        report.write(options.report)
        show(report, Console())
        say(f"written to {options.report}")
        if options.keep:
            _stay(stack, say)


# --- servers ---


@contextmanager
def _stack(partitions: int, say: Say) -> Iterator[Stack]:
    """Servers and worker, ready; all that was started here is stopped at the end, whatever happens."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    external_kafka = os.environ.get(_SECTION + "KAFKA__BOOTSTRAP_SERVERS")
    external_redis = os.environ.get(_SECTION + "REDIS__URL")
    with ExitStack() as stack:
        bootstrap_servers, broker_name = _kafka(stack, external_kafka)
        redis_url = external_redis or stack.enter_context(start_redis(FOLDER / "redis")).url
        redis = stack.enter_context(_redis(redis_url))
        redis_name = f"Redis {_version(redis)}"
        _forget_earlier(redis)
        say(f"{broker_name} at {bootstrap_servers}, {redis_name}; data and logs in {FOLDER}")
        # a topic of its own on a broker that may keep the one of an earlier demo
        own = f"-demo-{time.time_ns() // 1_000_000}" if external_kafka else ""
        topic, items_topic = f"clicks{own}", f"items{own}"
        security = kafka_client.security_options()
        kafka_client.ensure_topic(bootstrap_servers, topic, partitions, **security)
        kafka_client.ensure_topic(bootstrap_servers, items_topic, 1, _COMPACTED, **security)
        worker = _worker(bootstrap_servers, topic, items_topic, redis_url)
        say("starting the worker: python -m worker")
        stack.enter_context(worker)
        yield Stack(bootstrap_servers, topic, items_topic, redis, worker, broker_name, redis_name)


def _kafka(stack: ExitStack, external: str | None) -> tuple[str, str]:
    if external:
        return external, "your Kafka"
    broker = stack.enter_context(start_broker(FOLDER / "broker"))
    name = "Apache Kafka" if isinstance(broker, KafkaBroker) else "noida-db broker"
    return broker.bootstrap_servers, name


def _redis(url: str) -> Redis:
    try:
        return Redis.from_url(url)
    except ValueError as error:  # which names what is wrong, and no password
        raise DemoError(f"FRESHET_REDIS__URL: {error}") from None


def _worker(bootstrap_servers: str, topic: str, items_topic: str, redis_url: str) -> WorkerProcess:
    return WorkerProcess(
        FOLDER / "worker",
        {
            "FRESHET_KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers,
            "FRESHET_KAFKA__TOPICS": topic,
            "FRESHET_KAFKA__ITEMS_TOPIC": items_topic,
            "FRESHET_REDIS__URL": redis_url,
            "FRESHET_REDIS__PREFIX": PREFIX,
            # often enough to see some
            _OFTEN: os.environ.get(_OFTEN, "20000"),
        },
    )


def _version(redis: Redis) -> str:
    info: dict[str, Any] = redis.info("server")
    return str(info["redis_version"])


def _forget_earlier(redis: Redis) -> None:
    """Take away what an earlier demo left in a Redis that is not ours."""
    keys = redis.scan_iter(match=f"{PREFIX}:*", count=1000)
    while some := list(islice(keys, 1000)):
        redis.unlink(*some)


# --- traffic ---


def _describe(stack: Stack, dataset: Dataset, say: Say) -> None:
    """Send the items' titles and attributes. Raises DemoError."""
    try:
        with EventProducer(stack.bootstrap_servers, stack.items_topic, **kafka_client.security_options()) as producer:
            count = runner.send_items(dataset.items(), producer, time.time_ns() // 1_000_000)
    except DeliveryError as error:
        raise DemoError(str(error)) from error
    say(f"{count:,} items described in {stack.items_topic}")


@dataclass(frozen=True)
class Figures:
    """What was measured while events were sent."""

    events_sent: int
    events_per_s: float
    backlog: Buckets  # freshness in seconds, while unpaced
    paced_events: int
    paced_events_per_s: float
    paced: Buckets
    outside_s: list[float]
    outside_missed: int


class _Traffic:
    """Sends a data set through the stack in two stretches and measures each."""

    def __init__(self, stack: Stack, dataset: Dataset, say: Say) -> None:
        self._stack = stack
        self._dataset = dataset
        self._say = say

    def send(self, total: int) -> Figures:
        """Most of the events as fast as possible, then a stretch at a fixed rate. Raises DemoError."""
        last = min(PACED_EVENTS, max(1, total * 15 // 100))
        first = total - last
        start = self._metrics()
        began = time.monotonic()
        self._say(f"replaying {self._dataset.name} as fast as possible: {first:,} events")
        self._replay(Selection(0, first), Unpaced())
        middle = self._worker_has_read(first)
        events_per_s = first / (time.monotonic() - began)
        self._say(f"and at {PACED_RATE:,.0f} events/s, to measure freshness: {last:,} events")
        clicks = Counter(event.user for event in islice(self._dataset.interactions(), first))
        with Probe(self._stack.redis, PREFIX, clicks) as probe:
            outcome = self._replay(Selection(first, last), FixedRate(PACED_RATE), probe)
            end = self._worker_has_read(total)
        return Figures(
            total,
            events_per_s,
            middle.freshness.since(start.freshness),
            last,
            outcome.events_per_s,
            end.freshness.since(middle.freshness),
            probe.delays_s,
            probe.missed,
        )

    def _metrics(self) -> Metrics:
        return worker_view.metrics(self._stack.worker.http_url)

    def _replay(self, selection: Selection, pacer: Pacer, probe: Probe | None = None) -> Outcome:
        def watch(event: Interaction) -> None:
            if probe is not None:
                probe.sent(event.user)

        stack, dataset = self._stack, self._dataset
        security = kafka_client.security_options()
        with (
            EventProducer(stack.bootstrap_servers, stack.topic, **security) as producer,
            progress.shown(dataset.name, selection.total(dataset)) as advance,
        ):
            outcome = runner.replay(dataset, selection, pacer, producer, advance, watch=watch)
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.error is not None:
            raise DemoError(outcome.error)
        return outcome

    def _worker_has_read(self, count: int) -> Metrics:
        """Wait until everything has been read and its users' vectors are in Redis."""
        changed = time.monotonic()
        newest = self._metrics()
        with progress.shown("worker", count) as advance:
            while newest.freshness.count < count:
                quiet_s = time.monotonic() - changed
                if newest.records >= count and quiet_s > _SETTLED_S:
                    break  # not every record makes a vector: some may have been rejected
                if not self._stack.worker.running or quiet_s > _STALLED_S:
                    raise DemoError(f"the worker stopped reading.{self._stack.worker.log_tail()}")
                time.sleep(_POLL_S)
                before, newest = newest, self._metrics()
                if newest != before:
                    changed = time.monotonic()
                advance(int(newest.freshness.count))
        return newest


# --- the report ---


def _report(stack: Stack, dataset: Dataset, partitions: int, figures: Figures, elapsed_s: float) -> DemoReport:
    said = worker_view.heartbeat(stack.redis, PREFIX)
    vectors = Vectors(stack.redis, PREFIX)
    ranks: dict[str, Any] = {
        f"{who}{figure}_at_10{part}": worker_view.number(said, f"{who}{figure}_at_10{part}")
        for who in ("", "popularity_")
        for figure in ("recall", "ndcg", "mrr")
        for part in ("", "_last_half")
    }
    counts = ("read", "learned", "observed", "duplicate", "rejected")
    said_of = {n: int(worker_view.number(said, f"events_{n}") or 0) for n in (*counts, "described", "withdrawn")}
    items = said_of["described"] + said_of["withdrawn"]  # records, but no events
    return DemoReport(
        dataset=dataset.name,
        partitions=partitions,
        events_sent=figures.events_sent,
        **{f"events_{count}": said_of[count] for count in counts} | {"events_read": said_of["read"] - items},
        **ranks,
        paced_events=figures.paced_events,
        paced_events_per_s=round(figures.paced_events_per_s, 1),
        freshness_p50_ms=milliseconds(figures.paced, 0.5),
        freshness_p99_ms=milliseconds(figures.paced, 0.99),
        outside_freshness_p50_ms=quantile_ms(figures.outside_s, 0.5),
        outside_freshness_p99_ms=quantile_ms(figures.outside_s, 0.99),
        outside_freshness_samples=len(figures.outside_s),
        outside_freshness_missed=figures.outside_missed,
        events_per_s=round(figures.events_per_s, 1),
        backlog_freshness_p50_ms=milliseconds(figures.backlog, 0.5),
        backlog_freshness_p99_ms=milliseconds(figures.backlog, 0.99),
        checkpoints=int(worker_view.number(said, "checkpoints") or 0),
        users_published=vectors.count("user"),
        items_published=vectors.count("item"),
        elapsed_s=round(elapsed_s, 1),
        machine=Machine.this(stack.broker_name, stack.redis_name),
        users=_samples(vectors, dataset, figures.events_sent),
    )


def _samples(vectors: Vectors, dataset: Dataset, sent: int) -> list[UserSample]:
    """The last users who clicked, with what Redis recommends to them."""
    items = vectors.items()
    # An item that is not in Redis any more may still be among somebody's clicks.
    names = titles(dataset) | items.titles
    newest = islice(dataset.interactions(max(0, sent - _TAIL)), min(sent, _TAIL))
    last_users = dict.fromkeys(event.user for event in reversed(list(newest)))
    return list(islice(_sampled(vectors, items, names, last_users), SAMPLED_USERS))


def _sampled(vectors: Vectors, items: Items, names: dict[str, str], users: Iterable[str]) -> Iterator[UserSample]:
    for user_id in users:
        user = vectors.user(user_id)
        if user is not None and len(user.recent) >= _FEWEST_CLICKS:
            best = [item_id for item_id, _ in worker_view.top(user, items, 10)]
            clicks = user.recent[:10]
            yield UserSample(user_id, [names.get(i, i) for i in clicks], [names.get(i, i) for i in best])


def _stay(stack: Stack, say: Say) -> None:
    say(
        f"staying up until Ctrl-C: Kafka {stack.bootstrap_servers} (topic {stack.topic}), "
        f"Redis port {stack.redis.get_connection_kwargs().get('port')} (keys {PREFIX}:*), "
        f"worker {stack.worker.http_url}/metrics"
    )
    while stack.worker.running:
        time.sleep(_POLL_S)
