"""Logs without secrets, and metrics under their fixed names."""

import io
import json
import logging
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import SecretStr

from worker.redact import Redactor, mask_url, secrets_of
from worker.settings import KafkaSettings, LogSettings, RedisSettings, Settings
from worker.telemetry import BulkHistogram, Telemetry, configure_logging, freshness_buckets

# ---- logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A stream to log to; what the test changed in logging is put back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_our_logs_and_the_libraries_come_in_one_form(stream: io.StringIO) -> None:
    configure_logging(LogSettings(format="json"), stream=stream)
    structlog.get_logger("worker.loop").info("learned", events=128, user="用户")
    logging.getLogger("kafka.conn").warning("node %s is away", 7)
    ours, theirs = lines(stream)
    assert ours.items() >= {"event": "learned", "events": 128, "user": "用户", "level": "info"}.items()
    assert theirs.items() >= {"event": "node 7 is away", "level": "warning", "logger": "kafka.conn"}.items()
    assert ours["logger"] == "worker.loop"
    assert ours["timestamp"].endswith("Z")


def test_the_level_holds_for_both_and_talkative_libraries_need_more(stream: io.StringIO) -> None:
    configure_logging(LogSettings(format="json", level="info"), stream=stream)
    structlog.get_logger().debug("no")
    logging.getLogger("somewhere").debug("no")
    logging.getLogger("kafka").info("no")
    logging.getLogger("somewhere").info("yes")
    assert [line["event"] for line in lines(stream)] == ["yes"]
    configure_logging(LogSettings(format="json", level="debug"), stream=stream)
    logging.getLogger("kafka").debug("yes")
    assert len(lines(stream)) == 2


def test_no_secret_gets_into_a_line(stream: io.StringIO) -> None:
    secret = "hunter2"
    configure_logging(LogSettings(format="json"), [secret, "p%40ss"], stream)
    log = structlog.get_logger()
    log.info(
        f"password {secret}", a=secret, b=[{"deep": (f"x{secret}x",)}], c=SecretStr(secret), d=RuntimeError(secret)
    )
    log.info("urls", url="redis://me:geheim@host:1/0", more="see rediss://:p%40ss@host and http://ok/path")
    logging.getLogger("redis").error("auth %s failed for %r", secret, {"password": secret})
    try:
        raise ValueError(f"bad {secret}") from KeyError(secret)
    except ValueError:
        log.exception("failed")
        logging.getLogger("redis").exception("failed too")
    warnings.warn(f"do not use {secret}", stacklevel=1)
    text = stream.getvalue()
    for hidden in (secret, "geheim", "p%40ss"):
        assert hidden not in text
    assert "***@host:1/0" in text
    assert "http://ok/path" in text
    assert text.count("Traceback") == 2
    assert "do not use" in text
    assert lines(stream)[0]["a"] == "***"


def test_a_short_secret_does_not_break_the_form(stream: io.StringIO) -> None:
    configure_logging(LogSettings(format="json"), ['"', "e", ":"], stream)
    structlog.get_logger().info("hello", events=5)
    (line,) = lines(stream)
    assert (line["event"], line["events"]) == ("h***llo", 5)


def test_people_get_readable_lines(stream: io.StringIO) -> None:
    configure_logging(LogSettings(format="console"), ["s3cret"], stream)
    structlog.get_logger().warning("slow", seconds=3, password="s3cret")
    text = stream.getvalue()
    assert "slow" in text
    assert "seconds=3" in text
    assert "s3cret" not in text
    assert "\x1b[" not in text  # no colours where there is no terminal


def test_a_file_gets_json_by_itself(stream: io.StringIO) -> None:
    configure_logging(LogSettings(format="auto"), stream=stream)
    structlog.get_logger().info("hello")
    assert lines(stream)[0]["event"] == "hello"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:pw@h/0", "redis://***@h/0"),
        ("redis://u:p#x/y?z@h:1/0", "redis://***@h:1/0"),
        ("unix:///s?db=1&password=pw", "unix:///s?db=1&password=***"),
        ("rediss://h/0?ssl_password=pw&db=1", "rediss://h/0?ssl_password=***&db=1"),
        ("at redis://a:b@h and redis://c:d@i", "at redis://***@h and redis://***@i"),
        ("mail me@example.org", "mail me@example.org"),
        ("http://host/path", "http://host/path"),
    ],
)
def test_urls_lose_what_stands_before_the_host(text: str, shown: str) -> None:
    assert mask_url(text) == shown


def test_every_secret_of_the_settings_is_known() -> None:
    settings = Settings(
        kafka=KafkaSettings(sasl_password=SecretStr("one"), ssl_password=SecretStr("two")),
        redis=RedisSettings(url=SecretStr("redis://u:th%40ree@h/0?ssl_password=four")),
    )
    assert set(secrets_of(settings)) >= {"one", "two", "th%40ree", "th@ree", "four"}
    redact = Redactor(secrets_of(settings))
    assert redact("one two th%40ree th@ree four u h") == "*** *** *** *** *** u h"


def test_a_secret_inside_another_does_not_show_the_rest() -> None:
    assert Redactor(["abc", "abcdef"])("abcdef") == "***"


def test_no_secrets_is_no_problem() -> None:
    assert Redactor([""])("text") == "text"


# ---- metrics

NAMES = {
    "freshet_events_total",
    "freshet_rejected_total",
    "freshet_records_total",
    "freshet_lag",
    "freshet_position",
    "freshet_freshness_seconds",
    "freshet_step_seconds",
    "freshet_loss",
    "freshet_recall_at_k",
    "freshet_ndcg_at_k",
    "freshet_mrr_at_k",
    "freshet_rows",
    "freshet_evicted_total",
    "freshet_checkpoint_age_seconds",
    "freshet_checkpoints_total",
    "freshet_checkpoint_seconds",
    "freshet_checkpoint_bytes",
    "freshet_publish_backlog",
    "freshet_published_total",
    "freshet_publish_refused_total",
    "freshet_publish_errors_total",
    "freshet_nonfinite_vectors_total",
    "freshet_gap_records_total",
    "freshet_dead_letter_dropped_total",
    "freshet_nonfinite_steps_total",
    "freshet_oom_total",
    "freshet_micro_batch_size",
    "freshet_loop_age_seconds",
    "freshet_epoch",
    "freshet_info",
}


def test_every_metric_is_there_under_its_name_with_a_help_text() -> None:
    telemetry = Telemetry()
    helps = dict(
        line.removeprefix("# HELP ").split(" ", 1)
        for line in generate_latest(telemetry.registry).decode().splitlines()
        if line.startswith("# HELP ")
    )
    assert helps.keys() >= NAMES
    assert all(len(helps[name]) > 10 for name in NAMES)


def test_labels_are_what_dashboards_ask_for() -> None:
    telemetry = Telemetry()
    telemetry.events.labels("learned").inc(3)
    telemetry.rejected.labels("not_json").inc()
    telemetry.lag.labels("clicks", "0").set(5)
    telemetry.recall_at_k.labels("last_half", "popularity").set(0.08)
    telemetry.publish_errors.labels("timeout").inc()
    telemetry.describe("0.1.0", "two_tower", "cpu")
    value = telemetry.registry.get_sample_value
    assert value("freshet_events_total", {"outcome": "learned"}) == 3
    assert value("freshet_events_total", {"outcome": "duplicate"}) == 0
    assert value("freshet_rejected_total", {"reason": "not_json"}) == 1
    assert value("freshet_lag", {"topic": "clicks", "partition": "0"}) == 5
    assert value("freshet_recall_at_k", {"window": "last_half", "model": "popularity"}) == 0.08
    assert value("freshet_publish_errors_total", {"kind": "timeout"}) == 1
    assert value("freshet_published_total", {"table": "items"}) == 0
    assert value("freshet_info", {"version": "0.1.0", "family": "two_tower", "device": "cpu"}) == 1


def test_two_workers_in_one_process_do_not_share_metrics() -> None:
    first, second = Telemetry(), Telemetry(CollectorRegistry())
    first.records.inc()
    assert second.registry.get_sample_value("freshet_records_total") == 0


def test_the_age_of_a_checkpoint_begins_at_the_start_and_again_at_each_save() -> None:
    now = [100.0]
    telemetry = Telemetry(monotonic=lambda: now[0])
    now[0] = 130.0
    assert telemetry.registry.get_sample_value("freshet_checkpoint_age_seconds") == 30
    telemetry.checkpoint_saved()
    now[0] = 132.0
    assert telemetry.registry.get_sample_value("freshet_checkpoint_age_seconds") == 2


# ---- freshness


def test_buckets_rise_and_are_four_to_an_octave_where_it_matters() -> None:
    edges = np.array(freshness_buckets())
    assert edges[0] == 0.001
    assert edges[-1] == 120
    assert (np.diff(edges) > 0).all()
    fine = edges[(edges >= 0.002) & (edges <= 1)]
    assert (fine[1:] / fine[:-1] < 2 ** (1 / 4) + 1e-3).all()


def test_quantiles_are_near_the_true_ones() -> None:
    histogram = BulkHistogram("x", "x", freshness_buckets())
    seconds = np.random.default_rng(0).lognormal(np.log(0.03), 0.8, 100_000)
    for part in np.array_split(seconds, 37):
        histogram.observe_many(part)
    for share in (0.05, 0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(np.quantile(seconds, share), rel=0.05)


def test_the_exposition_is_cumulative_and_agrees_with_numpy() -> None:
    registry = CollectorRegistry()
    histogram = BulkHistogram("fresh_seconds", "x", [0.1, 0.2, 0.4])
    registry.register(histogram)
    histogram.observe_many(np.array([0.05, 0.1, 0.15, 0.2, 0.3, 9.0]))
    value = registry.get_sample_value
    counts = [value("fresh_seconds_bucket", {"le": edge}) for edge in ("0.1", "0.2", "0.4", "+Inf")]
    assert counts == [2, 4, 5, 6]
    assert value("fresh_seconds_count") == 6
    assert value("fresh_seconds_sum") == pytest.approx(9.8)


def test_odd_values_do_no_harm() -> None:
    histogram = BulkHistogram("x", "x", [1.0, 2.0])
    assert histogram.quantile(0.5) is None
    assert histogram.recent_quantile(0.5) is None
    histogram.observe_many(np.empty(0))
    histogram.observe_many(np.array([np.nan, np.inf]))
    assert histogram.quantile(0.5) is None
    histogram.observe_many(np.array([-5.0]))  # the producer's clock is ahead of ours
    assert 0 <= histogram.quantile(0.5) <= 1
    histogram.observe_many(np.full(100, 50.0))
    assert histogram.quantile(0.99) == 2.0  # at least the last edge
    assert histogram.quantile(0.0) is not None


def test_the_last_minute_forgets_what_is_older() -> None:
    now = [0.0]
    telemetry = Telemetry(monotonic=lambda: now[0])
    assert telemetry.freshness_summary() == {}
    telemetry.observe_freshness(np.full(1000, 2000))
    for now[0] in (30.0, 61.5):
        telemetry.observe_freshness(np.full(10, 20))
    summary = telemetry.freshness_summary()
    assert summary["freshness_p50_ms"] > 1000
    assert summary["freshness_p99_ms"] > 1000
    assert summary["freshness_p50_ms_last_minute"] == pytest.approx(20, rel=0.2)
    assert summary["freshness_p99_ms_last_minute"] == pytest.approx(20, rel=0.2)


def test_threads_may_observe_at_once() -> None:
    histogram = BulkHistogram("x", "x", freshness_buckets())
    threads = [
        threading.Thread(target=lambda: [histogram.observe_many(np.full(10, 0.01)) for _ in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (family,) = histogram.collect()
    assert next(sample.value for sample in family.samples if sample.name == "x_count") == 8000
