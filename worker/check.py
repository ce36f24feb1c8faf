"""`python -m worker check`: what a worker needs, asked once. Nothing is written to Kafka or Redis."""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from kafka import TopicPartition
from kafka.errors import KafkaError
from redis import Redis
from redis.exceptions import NoPermissionError, RedisError

from model.config import ModelConfig
from worker.checkpoint import CheckpointFolder, misfits
from worker.device import find_device
from worker.http import listen_problem
from worker.kafka_client import CLOSE_S, close_within, one_line, open_consumer
from worker.keys import Keys
from worker.redact import Redactor, secrets_of
from worker.redis_client import connect, describe
from worker.settings import CheckpointSettings, KafkaSettings, RuntimeSettings, Settings, SettingsError
from worker.source import SourceError

_LIMIT_S = 15.0  # of one check as a whole; each question in it has a limit of its own
_QUESTION_MS = 4000
_LITTLE_SPACE_BYTES = 1 << 30

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer."""

    status: Status
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.status:<5} {self.what:<12} {self.detail}"


def run_checks(settings: Settings, out: TextIO) -> int:
    """Write one line for each finding to `out`; returns the exit code: 1 if something failed, else 0."""
    redact = Redactor(secrets_of(settings))
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("kafka", lambda: check_kafka(settings.kafka)),
        ("redis", lambda: check_redis(settings)),
        ("checkpoints", lambda: check_checkpoints(settings.checkpoint, settings.model)),
        ("http", lambda: check_http(settings)),
        ("device", lambda: check_device(settings.runtime)),
    ]
    failed = False
    for what, check in checks:
        for finding in _within(what, check):
            failed |= finding.status == "FAIL"
            print(redact(str(finding)), file=out, flush=True)
    return int(failed)


def _within(what: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """What the check found in `_LIMIT_S`, in a thread that is left behind if it takes longer."""
    found: list[Finding] = []

    def collect() -> None:
        try:
            found.extend(check())
        except Exception as error:
            found.append(Finding("FAIL", what, one_line(error)))

    thread = threading.Thread(target=collect, name=f"check-{what}", daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    return [*found, Finding("FAIL", what, f"no answer within {_LIMIT_S:g} s")] if thread.is_alive() else found


# ---- Kafka


def check_kafka(settings: KafkaSettings) -> Iterator[Finding]:
    """The brokers, each topic with its offsets, and the topics for rejected records."""
    quick = settings.model_copy(update={"request_timeout_ms": _QUESTION_MS})
    try:
        consumer, *_ = open_consumer(quick)
    except (KafkaError, SourceError, OSError) as error:
        yield Finding("FAIL", "kafka", f"{settings.bootstrap_servers} cannot be reached: {one_line(error)}")
        return
    try:
        there = consumer.topics()
        yield Finding("ok", "kafka", f"{settings.bootstrap_servers} answers")
        for topic in settings.all_topics:
            yield _check_topic(consumer, topic, there)
            if settings.dead_letter_suffix:
                yield _check_dead_letters(topic + settings.dead_letter_suffix, there)
    except KafkaError as error:
        yield Finding("FAIL", "kafka", one_line(error))
    finally:
        close_within(consumer.close, CLOSE_S)


def _check_topic(consumer: Any, topic: str, there: set[str]) -> Finding:
    if topic not in there:
        return Finding("FAIL", "topic", f"{topic} is not there, or may not be seen; a worker waits for it")
    partitions = [TopicPartition(topic, number) for number in sorted(consumer.partitions_for_topic(topic))]
    first = consumer.beginning_offsets(partitions, timeout_ms=_QUESTION_MS)
    end = consumer.end_offsets(partitions, timeout_ms=_QUESTION_MS)
    shown = ", ".join(f"{at.partition}: {first[at]} to {end[at]}" for at in partitions)
    records = sum(end[at] - first[at] for at in partitions)
    return Finding("ok", "topic", f"{topic}: {records} offsets in {len(partitions)} partitions ({shown})")


def _check_dead_letters(topic: str, there: set[str]) -> Finding:
    if topic in there:
        return Finding("ok", "dead letters", topic)
    return Finding("warn", "dead letters", f"{topic} is not there; unless the broker makes it, rejected records wait")


# ---- Redis


def check_redis(settings: Settings) -> Iterator[Finding]:
    """The server, whether it can be written, and who publishes under the prefix."""
    try:
        with connect(settings.redis) as client:
            client.ping()
            yield from _check_server(client)
            yield _check_claim(client, settings)
    except (RedisError, OSError) as error:
        yield Finding("FAIL", "redis", describe(error))
    except SettingsError as error:
        yield Finding("FAIL", "redis", str(error))


def _check_server(client: Redis) -> Iterator[Finding]:
    try:
        info = client.info()
    except NoPermissionError:
        yield Finding("ok", "redis", "answers; INFO is not allowed, so its version and role are not known")
        return
    yield Finding("ok", "redis", f"version {info.get('redis_version')}, {info.get('used_memory_human')} in use")
    if info.get("role") != "master":
        yield Finding("FAIL", "redis", "is a replica: it cannot be written")
    policy = str(info.get("maxmemory_policy"))
    if info.get("maxmemory") and policy != "noeviction":
        yield Finding("warn", "redis", f"maxmemory-policy is {policy}: vectors may be evicted; noeviction is advised")


def _check_claim(client: Redis, settings: Settings) -> Finding:
    keys = Keys(settings.redis.prefix)
    meta = _hash(client, keys.meta)
    if not meta:
        return Finding("ok", "claim", f"nobody has published under {settings.redis.prefix} yet")
    worker = _hash(client, keys.worker)
    age_s = time.time() - int(worker.get("heartbeat_ms", 0)) / 1000
    who = f"epoch {meta.get('epoch')}, {worker.get('writer', 'unknown')}, dim {meta.get('dim')}, {meta.get('family')}"
    if meta.get("family") != settings.model.family:
        detail = f"{who}: this worker's {settings.model.family} needs another FRESHET_REDIS__PREFIX"
        return Finding("FAIL", "claim", detail)
    if age_s < 3 * settings.publish.heartbeat_s + settings.redis.timeout_s:
        return Finding("warn", "claim", f"{who} publishes now; a worker that starts here takes over from it")
    return Finding("ok", "claim", f"{who} published last, {age_s:.0f} s ago")


def _hash(client: Redis, key: str) -> dict[str, str]:
    fields = cast(dict[bytes, bytes], client.hgetall(key))
    return {name.decode(): value.decode(errors="replace") for name, value in fields.items()}


# ---- this machine


def check_checkpoints(settings: CheckpointSettings, model: ModelConfig) -> Iterator[Finding]:
    """The folder: can it be written, how much room is there, who has it, what is the newest checkpoint."""
    folder = settings.dir.resolve()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if (problem := _write_problem(there)) is not None:
        yield Finding("FAIL", "checkpoints", f"{folder} cannot be written: {problem}")
        return
    free = shutil.disk_usage(there).free
    status: Status = "ok" if free >= _LITTLE_SPACE_BYTES else "warn"
    yield Finding(status, "checkpoints", f"{folder} can be written, {free / 1e9:.1f} GB free")
    yield _lock(CheckpointFolder(folder, settings.keep))
    yield _newest(CheckpointFolder(folder, settings.keep), model)


def _write_problem(folder: Path) -> str | None:
    if not folder.is_dir():
        return f"{folder} is no folder"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"freshet")
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return None


def _lock(folder: CheckpointFolder) -> Finding:
    if (holder := folder.holder()) is None:
        return Finding("ok", "lock", "no worker has the folder")
    return Finding("warn", "lock", f"{holder} has the folder; no other worker can start on it meanwhile")


def _newest(folder: CheckpointFolder, model: ModelConfig) -> Finding:
    saved = folder.list()
    if not saved:
        return Finding("ok", "checkpoints", "none yet: a worker starts with an empty model")
    newest = saved[0]
    if newest.header is None:
        return Finding("warn", "checkpoints", f"the newest of {len(saved)} is damaged: {newest.problem}")
    if problems := misfits(newest.header, model.model_dump(mode="json")):
        return Finding("FAIL", "checkpoints", f"{newest.path.name} does not fit the settings: {'; '.join(problems)}")
    age_s = time.time() - newest.header.created_ms / 1000
    detail = f"the newest of {len(saved)} is {newest.path.name}: {newest.header.records} records, {age_s:.0f} s old"
    return Finding("ok", "checkpoints", detail)


def check_http(settings: Settings) -> Iterator[Finding]:
    """The address of health and metrics; where a worker runs on the checkpoints it is taken, by that one surely."""
    problem = listen_problem(settings.http)
    if problem is None:
        yield Finding("ok", "http", f"{settings.http.host}:{settings.http.port} is free")
        return
    runs = CheckpointFolder(settings.checkpoint.dir, settings.checkpoint.keep).holder() is not None
    yield Finding("warn" if runs else "FAIL", "http", problem)


def check_device(settings: RuntimeSettings) -> Iterator[Finding]:
    """The processor that would learn."""
    try:
        device = find_device(settings.device)
    except SettingsError as error:
        yield Finding("FAIL", "device", str(error))
        return
    yield Finding("ok", "device", f"{device} (asked for: {settings.device})")
