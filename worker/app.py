"""Puts a worker together: the only place where all the parts meet."""

import signal
import threading
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import structlog

from model.learner import OnlineLearner, warm_up
from worker.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    FormatError,
    Saved,
    as_checkpoint_error,
    load,
    now_ms,
)
from worker.checkpoint_view import find_checkpoint
from worker.dead_letter import KafkaDeadLetters
from worker.dedup import DedupWindow
from worker.device import set_up_device
from worker.events import Decoder
from worker.http import Health, HttpServer
from worker.ingest import Ingest, item_intake
from worker.kafka_source import KafkaSource
from worker.loop import Worker
from worker.outbox import Outbox
from worker.publisher import Publisher
from worker.report import Report
from worker.saver import Saver
from worker.settings import Settings
from worker.state import WorkerState, check_compatible
from worker.telemetry import Telemetry
from worker.updates import Meta

Found = tuple[Saved, dict[str, Any]]  # a verified checkpoint and its state

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts: at the newest sound checkpoint unless something else is asked for."""

    fresh: bool = False  # with an empty model although there are checkpoints
    checkpoint: str | None = None  # at this one: a rollback
    from_timestamp: bool = False  # the settings' start is asked for, which only a fresh start heeds

    def find(self, folder: CheckpointFolder) -> Found | None:
        """The checkpoint to start at, None for a fresh start. CheckpointError when it cannot be used."""
        if self.checkpoint is not None:
            return load(find_checkpoint(folder, self.checkpoint))
        if self.fresh:
            return None
        try:
            found = folder.newest_sound()
        except FormatError as error:
            advice = "use the version that wrote it, go back to an older one by --checkpoint, or start by --fresh"
            raise CheckpointError(f"{error}; {advice}") from error
        if found is not None and self.from_timestamp:
            raise CheckpointError(
                f"--from-timestamp would count events twice that {found[0].path} knows already; "
                f"it needs --fresh where there is a checkpoint"
            )
        if found is None and (damaged := folder.list()):
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints in {folder.path} can be used; "
                f"restore one, or start with an empty model by --fresh. The newest: {damaged[0].problem or 'damaged'}"
            )
        return found


def run(settings: Settings, start: Start, *, drain: bool = False) -> None:
    """Run a worker until SIGTERM or SIGINT; with `drain`, until there is nothing left to read.

    Raises CheckpointError or SettingsError when it cannot start. An unexpected error ends it without a save: the
    newest checkpoint is sound, what is in memory may not be.
    """
    stopping = threading.Event()
    _handle_signals(lambda *_: stopping.set())
    with ExitStack() as stack:
        # While the interpreter ends, one more signal would kill it, and a good stop would look like a bad one.
        stack.callback(_handle_signals, signal.SIG_IGN)
        folder = CheckpointFolder(settings.checkpoint.dir, settings.checkpoint.keep)
        folder.lock()
        stack.callback(folder.unlock)
        health, telemetry = Health(settings.http.stale_after_s), Telemetry()
        stack.callback(HttpServer(settings.http, health, telemetry.registry).close)
        found = start.find(folder)
        worker = assemble(settings, folder, found, health, telemetry, stopping, replace=start.fresh)
        stack.callback(worker.saver.close, settings.runtime.grace_s)  # also where an error ends the run
        worker.publisher.start()
        worker.run(drain=drain)
        worker.stop()


def _handle_signals(handler: Any) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, handler)


def assemble(
    settings: Settings,
    folder: CheckpointFolder,
    found: Found | None,
    health: Health,
    telemetry: Telemetry,
    stopping: threading.Event,
    *,
    replace: bool = False,
) -> Worker:
    """A worker that goes on from the checkpoint `found`, or starts afresh without one."""
    learner = _learner(settings, found, telemetry)
    dead_letters, source = KafkaDeadLetters(settings.kafka), KafkaSource(settings.kafka)
    items, dedup = item_intake(settings), DedupWindow(settings.events.dedup_window)
    ingest = Ingest(Decoder(settings.events), dedup, dead_letters, learner, items)
    header = found[0].header if found else None
    meta = Meta(learner.readout.dim, learner.family.name, learner.readout.exact, _model_id(found), now_ms())
    saved_epoch = header.epoch if header else 0
    publisher = Publisher(
        settings.redis,
        settings.publish,
        meta,
        checkpoint_epoch=saved_epoch,
        replace=replace,
        telemetry=telemetry,
    )
    outbox = Outbox(learner, publisher, settings.publish, settings.kafka.all_topics, items.catalogue)
    state = WorkerState(learner, ingest, outbox, source, lambda: publisher.epoch or saved_epoch, meta.model)
    is_newest = _go_on_from(found, state, source, folder)
    saver = Saver(
        folder,
        settings.checkpoint,
        state.snapshot,
        lambda: ingest.records + outbox.removed,
        source,
        dead_letters,
        superseded=lambda: publisher.superseded_by is not None,
    )
    if not is_newest:
        saver.save_when_positions_are_known()
    stalled_after_s = settings.http.stale_after_s
    report = Report(
        learner, ingest, outbox, publisher, saver, source, dead_letters, telemetry, health, stalled_after_s,
        items.catalogue,
    )  # fmt: skip
    return Worker(
        settings.runtime, source, ingest, learner, outbox, publisher, dead_letters, saver, report, health, stopping
    )


def _go_on_from(found: Found | None, state: WorkerState, source: KafkaSource, folder: CheckpointFolder) -> bool:
    """Give the parts what the checkpoint holds, and the source its positions; is it the newest of the folder?"""
    if found is None or found[0].header is None:
        log.info("fresh_start", checkpoints=str(folder.path))
        source.seek({})
        return False
    positions = found[0].header.positions_by_partition()
    with as_checkpoint_error(found[0].path):
        state.load(found[1])
    source.seek(positions, found[0].header.topic_ids)
    log.info("resumed", checkpoint=str(found[0].path), records=found[0].header.records)
    is_newest = found[0].path.resolve() in [saved.path.resolve() for saved in folder.list()[:1]]
    if not is_newest:  # a newer one is damaged, or this one was asked for
        source.rewind(positions)
    return is_newest


def _learner(settings: Settings, found: Found | None, telemetry: Telemetry) -> OnlineLearner:
    if found and found[0].header:
        with as_checkpoint_error(found[0].path):
            check_compatible(found[0].path, found[1], found[0].header, settings.model)
    device = set_up_device(settings.runtime)
    telemetry.describe(version("freshet"), settings.model.family, str(device))
    warm_up(settings.model, device)
    share, window = settings.evaluation.share, settings.evaluation.window
    return OnlineLearner(settings.model, device, ranked_share=share, window=window, clock=time.monotonic)


def _model_id(found: Found | None) -> str:
    if found is None:
        return uuid.uuid4().hex
    with as_checkpoint_error(found[0].path):
        return str(found[1]["model_id"])
