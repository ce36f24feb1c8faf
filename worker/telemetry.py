"""Logs and metrics. Nothing secret gets into either."""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from structlog.typing import EventDict, Processor, WrappedLogger

from worker.events import Reason
from worker.redact import Redactor
from worker.settings import LogSettings

# ---- logs

# Libraries that tell every reconnection; their warnings are enough unless somebody is looking for something.
_TALKATIVE = ("kafka", "redis", "urllib3", "asyncio")
# In an outage these tell a dozen errors a second; whoever of ours speaks to Kafka tells it once in a while.
_STORMY = ("kafka.cluster", "kafka.consumer", "kafka.coordinator", "kafka.net", "kafka.producer")
# These write down every byte that is sent, passwords included, in a form that no redaction knows.
_VERBATIM = ("kafka.net.connection", "kafka.protocol.parser")


def configure_logging(settings: LogSettings, secrets: Iterable[str] = (), stream: TextIO | None = None) -> None:
    """Send structlog and the standard library's logs to `stream` (standard error), without the `secrets`.

    Logging is the process's: a second call replaces the first one's settings.
    """
    stream = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.PositionalArgumentsFormatter(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    _route(settings.level.upper(), stream, _formatter(settings, shared, stream, Redactor(secrets)))


def _formatter(settings: LogSettings, shared: list[Processor], stream: TextIO, redact: Redactor) -> logging.Formatter:
    console = settings.format == "console" or (settings.format == "auto" and stream.isatty())
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=stream.isatty())
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    last: list[Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _Redaction(redact),
        renderer,
    ]
    # a library's own records pass `shared` here; ours have passed it already
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=last)


def _route(level: str, stream: TextIO, formatter: logging.Formatter) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(level if level in ("DEBUG", "ERROR") else "WARNING")
    for name in _STORMY:
        logging.getLogger(name).setLevel(logging.DEBUG if level == "DEBUG" else logging.CRITICAL)
    for name in _VERBATIM:
        logging.getLogger(name).setLevel(logging.INFO if level == "DEBUG" else logging.CRITICAL)


class _Redaction:
    """A processor that takes secrets out of every value of a log line, tracebacks included."""

    def __init__(self, redact: Redactor) -> None:
        self._redact = redact

    def __call__(self, _logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
        return {key: self._clean(value) for key, value in line.items()}

    def _clean(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, dict):
            return {self._redact(str(key)): self._clean(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._clean(inner) for inner in value]
        return self._redact(value if isinstance(value, str) else repr(value))


# ---- metrics

_STEP_BUCKETS = tuple(round(0.0005 * 2**power, 6) for power in range(18))  # 0.5 ms to 65 s


class BulkHistogram(Collector):
    """A Prometheus histogram that takes many values at once, and tells quantiles itself. Thread-safe.

    Values are seconds. Negative ones (clocks differ between machines) count as 0.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        upper_s: Iterable[float],
        *,
        window_s: float = 60.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._help = name, help_text
        self._upper = np.asarray(tuple(upper_s), dtype=np.float64)  # (b,), rising
        self._counts = np.zeros(len(self._upper) + 1, dtype=np.int64)  # the last one: above all buckets
        self._sum = 0.0
        self._window_s, self._monotonic = window_s, monotonic
        self._recent: deque[tuple[float, npt.NDArray[np.int64]]] = deque()  # when its second began, counts
        self._lock = threading.Lock()

    def observe_many(self, seconds: npt.NDArray[np.floating[Any]]) -> None:
        """Count every value of `seconds`, shape (n,). Values that are not finite are left out."""
        values = np.maximum(seconds[np.isfinite(seconds)], 0.0)
        if not len(values):
            return
        # a bucket holds its upper edge
        buckets = np.searchsorted(self._upper, values, side="left")
        counts = np.bincount(buckets, minlength=len(self._counts))
        with self._lock:
            self._counts += counts
            self._sum += float(values.sum())
            self._add_recent(counts)

    def _add_recent(self, counts: npt.NDArray[np.int64]) -> None:
        now = self._monotonic()
        self._forget(now)
        if self._recent and now - self._recent[-1][0] < 1.0:
            self._recent[-1][1].__iadd__(counts)
        else:
            self._recent.append((now, counts.copy()))

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > self._window_s:
            self._recent.popleft()

    def quantile(self, share: float) -> float | None:
        """Seconds below which `share` of all values lie, interpolated; None when there are none."""
        with self._lock:
            counts = self._counts.copy()
        return self._quantile(counts, share)

    def recent_quantile(self, share: float) -> float | None:
        """The same, of the last `window_s` seconds."""
        with self._lock:
            self._forget(self._monotonic())
            counts = np.sum([counts for _, counts in self._recent], axis=0, dtype=np.int64)
        return self._quantile(np.atleast_1d(counts), share)

    def _quantile(self, counts: npt.NDArray[np.int64], share: float) -> float | None:
        total = int(counts.sum())
        if total == 0:
            return None
        up_to = np.cumsum(counts)
        rank = share * total
        bucket = int(np.searchsorted(up_to, rank, side="left"))
        bucket = max(bucket, int(np.flatnonzero(counts)[0]))
        if bucket == len(self._upper):
            return float(self._upper[-1])  # beyond the last bucket: at least this
        lower = float(self._upper[bucket - 1]) if bucket else 0.0
        inside = (rank - (up_to[bucket] - counts[bucket])) / counts[bucket]
        return lower + max(0.0, float(inside)) * (float(self._upper[bucket]) - lower)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            up_to, total = np.cumsum(self._counts), self._sum
        edges = [*(repr(float(edge)) for edge in self._upper), "+Inf"]
        buckets = list(zip(edges, map(float, up_to), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=total)


def freshness_buckets() -> tuple[float, ...]:
    """1 ms to 120 s; four to an octave from 2 ms to 1 s, so that quantiles interpolate to about 10%."""
    fine = [0.002 * 2 ** (step / 4) for step in range(36)]  # 2 ms to 0.86 s
    return tuple(round(edge, 6) for edge in (0.001, 0.0015, *fine, 1, 1.5, 2, 3, 5, 8, 12, 20, 30, 60, 120))


class Telemetry:
    """Every metric of the worker, in a registry of its own. Thread-safe."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._monotonic = monotonic
        self._events()
        self._model()
        self._checkpoints()
        self._publishing()
        self._process()
        self._begin_at_zero()

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"freshet_{name}", help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"freshet_{name}", help_text, labels, registry=self.registry)

    def _seconds(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"freshet_{name}", help_text, buckets=_STEP_BUCKETS, registry=self.registry)

    def _events(self) -> None:
        self.records = self._counter("records_total", "Records read.")
        self.events = self._counter(
            "events_total",
            "Records by outcome: learned, observed, ignored, forgotten, duplicate, tombstone; described, withdrawn.",
            "outcome",
        )
        self.rejected = self._counter("rejected_total", "Records rejected, by reason.", "reason")
        self.dead_letter_dropped = self._counter(
            "dead_letter_dropped_total", "Rejected records whose payload was dropped: their topic was away."
        )
        self.lag = self._gauge("lag", "Offsets between the position and the end.", "topic", "partition")
        self.position = self._gauge("position", "Next offset to read.", "topic", "partition")
        self.gap_records = self._counter(
            "gap_records_total", "Records lost because retention had passed them.", "topic", "partition"
        )

    def _model(self) -> None:
        self.step_seconds = self._seconds("step_seconds", "Duration of a learning step.")
        self.loss = self._gauge("loss", "Loss of the last mini-batch.")
        self.micro_batch_size = self._gauge("micro_batch_size", "Samples on the device at once.")
        self.nonfinite_steps = self._counter(
            "nonfinite_steps_total", "Steps skipped because loss or gradients were not finite."
        )
        self.oom = self._counter("oom_total", "Times the device ran out of memory.")
        each = "window", "model"
        self.recall_at_k = self._gauge("recall_at_k", "Prequential Recall@k.", *each)
        self.ndcg_at_k = self._gauge("ndcg_at_k", "Prequential NDCG@k.", *each)
        self.mrr_at_k = self._gauge("mrr_at_k", "Prequential MRR@k.", *each)
        self.rows = self._gauge("rows", "Ids that have a row.", "table")
        self.evicted = self._counter("evicted_total", "Ids whose row was taken back.", "table")

    def _checkpoints(self) -> None:
        self.checkpoints = self._counter("checkpoints_total", "Checkpoints, by result: ok, failed.", "result")
        self.checkpoint_seconds = self._seconds("checkpoint_seconds", "Duration of a checkpoint.")
        self.checkpoint_bytes = self._gauge("checkpoint_bytes", "Size of the newest checkpoint.")
        self.checkpoint_age = self._gauge(
            "checkpoint_age_seconds", "Time since the last checkpoint, or since the start before the first."
        )
        self._saved = self._monotonic()
        self.checkpoint_age.set_function(lambda: self._monotonic() - self._saved)

    def checkpoint_saved(self) -> None:
        """The age of the newest checkpoint begins now."""
        self._saved = self._monotonic()

    def _publishing(self) -> None:
        self.freshness = BulkHistogram(
            "freshet_freshness_seconds",
            "From an event's record timestamp to the acknowledgement that its user's new vector is in Redis.",
            freshness_buckets(),
            monotonic=self._monotonic,
        )
        self.registry.register(self.freshness)
        self.publish_backlog = self._gauge("publish_backlog", "Ids that wait to be published.", "table")
        self.published = self._counter("published_total", "Vectors written to Redis.", "table")
        self.publish_refused = self._counter(
            "publish_refused_total", "Writes that Redis refused because it holds something newer."
        )
        self.publish_errors = self._counter("publish_errors_total", "Calls to Redis that failed.", "kind")
        self.nonfinite_vectors = self._counter(
            "nonfinite_vectors_total", "Vectors not published because they were not finite.", "table"
        )
        self.epoch = self._gauge("epoch", "This worker's epoch; 0 until it has claimed.")

    def _process(self) -> None:
        self.loop_age = self._gauge("loop_age_seconds", "Time since the loop last turned.")
        self._info = Info("freshet", "What runs here.", registry=self.registry)

    def _begin_at_zero(self) -> None:
        # a series that is there from the start lets rate() and increase() see its first count
        events = ("learned", "observed", "ignored", "forgotten", "duplicate", "tombstone")
        for outcome in (*events, "described", "withdrawn"):
            self.events.labels(outcome)
        for reason in Reason:
            self.rejected.labels(reason)
        for result in ("ok", "failed"):
            self.checkpoints.labels(result)
        for metric in (self.rows, self.evicted):
            metric.labels("descriptions")
        for metric in (self.rows, self.evicted, self.publish_backlog, self.published, self.nonfinite_vectors):
            for table in ("users", "items"):
                metric.labels(table)

    def describe(self, version: str, family: str, device: str) -> None:
        """Fill `freshet_info`."""
        self._info.info({"version": version, "family": family, "device": device})

    def observe_freshness(self, delays_ms: npt.NDArray[np.integer[Any]]) -> None:
        """Count the freshness of many events, shape (n,)."""
        self.freshness.observe_many(delays_ms / np.float64(1000))

    def freshness_summary(self) -> dict[str, float]:
        """p50 and p99 of freshness in ms, of the whole run and of the last minute; empty before any."""
        found = {
            f"freshness_p{percent}_ms{suffix}": quantile(percent / 100)
            for percent in (50, 99)
            for suffix, quantile in (
                ("", self.freshness.quantile),
                ("_last_minute", self.freshness.recent_quantile),
            )
        }
        return {name: round(1000 * value, 3) for name, value in found.items() if value is not None}
