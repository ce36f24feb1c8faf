"""What the worker says about itself: heartbeat, metrics, readiness, and a line in the log now and then."""

from collections import Counter

import structlog

from model.learner import OnlineLearner
from worker.catalogue import Catalogue
from worker.dead_letter import DeadLetters
from worker.http import Health
from worker.ingest import OUTCOMES, Ingest
from worker.outbox import Outbox
from worker.saver import Saves
from worker.source import Partition, Source
from worker.telemetry import Telemetry
from worker.updates import Publishes

_EVERY_S = 0.5
_LOG_EVERY_S = 30.0
_RATE_OVER_S = 10.0

log = structlog.get_logger(__name__)


class Report:
    """Reads the other parts, changes none of them."""

    def __init__(
        self,
        learner: OnlineLearner,
        ingest: Ingest,
        outbox: Outbox,
        publisher: Publishes,
        saver: Saves,
        source: Source,
        dead_letters: DeadLetters,
        telemetry: Telemetry,
        health: Health,
        stalled_after_s: float,
        catalogue: Catalogue,
    ) -> None:
        self._learner, self._ingest, self._outbox, self._publisher = learner, ingest, outbox, publisher
        self._saver, self._source, self._telemetry, self._health = saver, source, telemetry, health
        self._stalled_after_s, self._catalogue = stalled_after_s, catalogue
        self._due_s = self._log_due_s = float("-inf")
        self._dead_letters = dead_letters
        self._told = self._counted()
        self._saves_told = self._failures_told = 0
        self._rate: list[tuple[float, int]] = []  # (time, records) of the last seconds
        self._moved: dict[Partition, tuple[int, float]] = {}  # position, since when
        self._loss: float | None = None
        self._lag: dict[Partition, int] = {}
        telemetry.loop_age.set_function(lambda: health.age_s)  # a loop that hangs cannot tell its age itself

    def turn(self, now_s: float) -> None:
        """Bring everything up to date, a few times a second."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + _EVERY_S
        self._lag = self._source.lag()
        for gap in self._source.take_gaps():
            self._telemetry.gap_records.labels(gap.partition.topic, gap.partition.partition).inc(gap.lost)
        self._rate = [*((t, n) for t, n in self._rate if now_s - t <= _RATE_OVER_S), (now_s, self._ingest.records)]
        self._count_events()
        self._tell_positions(now_s)
        self._tell_model()
        self._tell_checkpoints()
        self._telemetry.publish_backlog.labels("users").set(self._outbox.backlog)
        self._telemetry.publish_backlog.labels("items").set(self._outbox.items_backlog)
        self._tell_reasons(self._reasons(now_s))
        if now_s >= self._log_due_s:
            self._log_due_s = now_s + _LOG_EVERY_S
            self.log("progress")

    def figures(self) -> dict[str, str | int | float | None]:
        """The main figures, flat, for the heartbeat."""
        counts = {f"events_{outcome}": self._ingest.counts[outcome] for outcome in OUTCOMES}
        return {
            "state": self._state(),
            "events_read": self._ingest.records,
            **counts,
            **{f"rejected_{reason}": count for reason, count in self._ingest.reasons.items()},
            **{name: round(value, 6) for name, value in self._learner.metrics.report().items()},
            **self._telemetry.freshness_summary(),
            "events_per_s": round(self._events_per_s(), 1),
            "lag": sum(self._lag.values()) if self._lag else None,
            "loss": self._loss,
            "steps": self._learner.steps,
            "users": len(self._learner.users),
            "items": len(self._learner.items),
            "descriptions": len(self._catalogue),
            "users_published": self._outbox.users_published,
            "items_published": self._outbox.items_published,
            "publish_backlog": self._outbox.backlog,
            "checkpoints": self._saver.saves,
            "checkpoint_failures": self._saver.failures,
        }

    def log(self, event: str) -> None:
        """The main figures as a line in the log."""
        shown = ("state", "events_read", "events_learned", "events_rejected", "events_per_s", "lag")
        figures = self.figures()
        log.info(event, **{name: figures[name] for name in (*shown, "recall_at_10", "checkpoints")})

    # --- inside --------------------------------------------------------------------------------------------

    def _state(self) -> str:
        if self._publisher.superseded_by is not None:
            return "superseded"
        return "running" if self._outbox.live else "catching_up"

    def _events_per_s(self) -> float:
        (first, before), (last, now) = (self._rate[0], self._rate[-1]) if self._rate else ((0.0, 0), (0.0, 0))
        return (now - before) / (last - first) if last > first else 0.0

    def _reasons(self, now_s: float) -> dict[str, str | None]:
        superseded = self._publisher.superseded_by is not None
        return {
            "start": None,
            "kafka": None if self._source.connected else "Kafka is out of reach, or the topic is not there yet",
            "partitions": self._stopped_partitions() or self._stalled_partitions(now_s),
            "redis": self._publisher.problem,
            "catching_up": None if self._outbox.live else "catching up with what readers have already seen",
            "checkpoint": self._saver.problem,
            "superseded": self._publisher.problem if superseded else None,
        }

    def _tell_reasons(self, reasons: dict[str, str | None]) -> None:
        if reasons["superseded"] is not None:  # for good: what else there may be is no concern of this worker's
            reasons = dict.fromkeys(reasons) | {"superseded": reasons["superseded"]}
        for reason, message in reasons.items():
            self._health.set(reason, message)

    def _stopped_partitions(self) -> str | None:
        stopped = [f"{topic}/{partition}: {why}" for (topic, partition), why in self._source.stopped.items()]
        return f"cannot be read any further: {'; '.join(stopped)}" if stopped else None

    def _stalled_partitions(self, now_s: float) -> str | None:
        stalled = [
            f"{at.topic}/{at.partition}"
            for at, (_, since) in self._moved.items()
            if self._lag.get(at, 0) > 0 and now_s - since > self._stalled_after_s
        ]
        return f"no progress although there is lag: {', '.join(stalled)}" if stalled else None

    def _count_events(self) -> None:
        now = self._counted()
        metrics = {
            "outcome": self._telemetry.events,
            "reason": self._telemetry.rejected,
            "evicted": self._telemetry.evicted,
            "records": self._telemetry.records,
            "dropped": self._telemetry.dead_letter_dropped,
        }
        for name, count in (now - self._told).items():
            kind, _, which = name.partition(":")
            metric = metrics[kind]
            (metric.labels(which) if which else metric).inc(count)
        self._told = now

    def _counted(self) -> Counter[str]:
        """Everything that is counted elsewhere and told as a metric, by kind and label."""
        ingest, outbox = self._ingest, self._outbox
        return Counter(
            {f"outcome:{outcome}": n for outcome, n in ingest.counts.items() if outcome != "rejected"}
            | {f"reason:{reason}": n for reason, n in ingest.reasons.items()}
            | {f"evicted:{table}": n for table, n in outbox.evicted.items()}
            | {"evicted:descriptions": self._catalogue.evicted}
            | {"records": ingest.records, "dropped": self._dead_letters.dropped}
        )

    def _tell_positions(self, now_s: float) -> None:
        for at, offset in self._source.positions().items():
            self._telemetry.position.labels(at.topic, at.partition).set(offset)
            if self._moved.get(at, (-1, 0.0))[0] != offset:
                self._moved[at] = (offset, now_s)
        for at, behind in self._lag.items():
            self._telemetry.lag.labels(at.topic, at.partition).set(behind)

    def _tell_model(self) -> None:
        steps = self._learner.take_figures()
        if steps.steps:
            self._loss = round(float(steps.loss) / steps.steps, 6)
            self._telemetry.loss.set(self._loss)
            self._telemetry.nonfinite_steps.inc(float(steps.skipped))
            self._telemetry.oom.inc(steps.out_of_memory)
        for seconds in steps.seconds:
            self._telemetry.step_seconds.observe(seconds)
        self._telemetry.micro_batch_size.set(self._learner.micro_batch_size)
        self._telemetry.rows.labels("users").set(len(self._learner.users))
        self._telemetry.rows.labels("items").set(len(self._learner.items))
        self._telemetry.rows.labels("descriptions").set(len(self._catalogue))
        report = self._learner.metrics.report()
        for figure in ("recall", "ndcg", "mrr"):
            gauge = getattr(self._telemetry, f"{figure}_at_k")
            for model, prefix in (("freshet", ""), ("popularity", "popularity_")):
                for window, suffix in (("all", ""), ("last_half", "_last_half"), ("window", "_window")):
                    gauge.labels(window, model).set(report[f"{prefix}{figure}_at_10{suffix}"])

    def _tell_checkpoints(self) -> None:
        new, failed = self._saver.saves - self._saves_told, self._saver.failures - self._failures_told
        self._saves_told, self._failures_told = self._saver.saves, self._saver.failures
        self._telemetry.checkpoints.labels("ok").inc(new)
        self._telemetry.checkpoints.labels("failed").inc(failed)
        if new and self._saver.newest is not None:
            self._telemetry.checkpoint_saved()
            self._telemetry.checkpoint_bytes.set(self._saver.newest.bytes)
            self._telemetry.checkpoint_seconds.observe(self._saver.seconds)
