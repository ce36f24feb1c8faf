"""The worker's loop without servers: a file is read, learned from and scored, and nothing is published or saved."""

import threading
import time
from collections.abc import Callable, Iterable

from model.learner import OnlineLearner
from worker.checkpoint import Saved
from worker.dead_letter import NoDeadLetters
from worker.dedup import DedupWindow
from worker.device import set_up_device
from worker.events import Decoder
from worker.file_source import FileSource, Record
from worker.http import Health
from worker.ingest import Ingest, item_intake
from worker.loop import Worker
from worker.outbox import Outbox
from worker.report import Report
from worker.settings import Settings
from worker.telemetry import Telemetry
from worker.updates import Ack, Publishes, Update


class NoPublisher:
    """Publishes nowhere: it never has room for anything."""

    epoch: int | None = None
    seen_positions: bytes | None = None
    superseded_by: int | None = None
    problem: str | None = None
    connected = False

    def start(self) -> None:
        """There is no thread."""

    def take_loss(self) -> bool:
        """Nothing is lost where nothing is kept."""
        return False

    def ready_for(self, kind: type[Update]) -> bool:  # noqa: ARG002
        """Never."""
        return False

    def submit(self, update: Update) -> None:
        """Never called, since it is never ready."""

    def acknowledged(self) -> list[Ack]:
        """Nothing."""
        return []

    def sweep(self, version: int = 0) -> None:
        """There is nothing to sweep."""

    def close(self, timeout_s: float) -> bool:  # noqa: ARG002
        """Nothing was handed over."""
        return True


class NoSaver:
    """Saves nothing."""

    saves = failures = 0
    problem: str | None = None
    newest: Saved | None = None
    seconds = 0.0

    def turn(self, now_s: float) -> None:
        """Nothing is due."""

    def save_now(self, timeout_s: float, now_s: float) -> bool:  # noqa: ARG002
        """Nothing to do."""
        return True

    def close(self, timeout_s: float) -> bool:  # noqa: ARG002
        """Nothing is being written."""
        return True


def offline_worker(
    settings: Settings,
    records: Iterable[Record],
    publisher_for: Callable[[OnlineLearner], Publishes] = lambda learner: NoPublisher(),  # noqa: ARG005
) -> Worker:
    """A worker over `records` (value, timestamp in ms); `run(drain=True)` takes all of them."""
    device = set_up_device(settings.runtime)
    share, window = settings.evaluation.share, settings.evaluation.window
    learner = OnlineLearner(settings.model, device, ranked_share=share, window=window, clock=time.monotonic)
    publisher = publisher_for(learner)
    source, saver, dead_letters = FileSource(records), NoSaver(), NoDeadLetters()
    items, dedup = item_intake(settings), DedupWindow(settings.events.dedup_window)
    ingest = Ingest(Decoder(settings.events), dedup, dead_letters, learner, items)
    outbox = Outbox(learner, publisher, settings.publish, catalogue=items.catalogue)
    health, telemetry = Health(settings.http.stale_after_s), Telemetry()
    limit_s = settings.http.stale_after_s
    report = Report(
        learner, ingest, outbox, publisher, saver, source, dead_letters, telemetry, health, limit_s, items.catalogue
    )
    return Worker(
        settings.runtime, source, ingest, learner, outbox, publisher, dead_letters, saver, report, health,
        threading.Event(),
    )  # fmt: skip
