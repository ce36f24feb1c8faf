"""The demo's report: which figures it has, as JSON and for people."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from replay.worker_view import Buckets


@dataclass(frozen=True)
class Machine:
    """Where the figures were measured."""

    cores: int
    system: str
    python: str
    broker: str
    redis: str

    @classmethod
    def this(cls, broker: str, redis: str) -> "Machine":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(cores, f"{platform.system()} {platform.machine()}", platform.python_version(), broker, redis)


@dataclass(frozen=True)
class UserSample:
    """One user, from what is in Redis alone."""

    user_id: str
    last_clicks: list[str]  # titles, newest first
    top: list[str]  # titles, best first


@dataclass(frozen=True)
class DemoReport:
    """Every figure of the demo. None where it was not measured."""

    dataset: str
    partitions: int
    events_sent: int
    events_read: int
    events_learned: int
    events_observed: int
    events_duplicate: int
    events_rejected: int
    recall_at_10: float | None
    recall_at_10_last_half: float | None
    ndcg_at_10: float | None
    ndcg_at_10_last_half: float | None
    mrr_at_10: float | None
    mrr_at_10_last_half: float | None
    popularity_recall_at_10: float | None
    popularity_recall_at_10_last_half: float | None
    popularity_ndcg_at_10: float | None
    popularity_ndcg_at_10_last_half: float | None
    popularity_mrr_at_10: float | None
    popularity_mrr_at_10_last_half: float | None
    # the paced stretch: from the record's timestamp to Redis' acknowledgement, by the worker's own clock
    paced_events: int
    paced_events_per_s: float
    freshness_p50_ms: float | None
    freshness_p99_ms: float | None
    # the same stretch from outside: from sending a click to reading it back from Redis
    outside_freshness_p50_ms: float | None
    outside_freshness_p99_ms: float | None
    outside_freshness_samples: int
    outside_freshness_missed: int
    # the unpaced stretch: here freshness is the backlog
    events_per_s: float
    backlog_freshness_p50_ms: float | None
    backlog_freshness_p99_ms: float | None
    checkpoints: int
    users_published: int  # users that have a vector in Redis
    items_published: int
    elapsed_s: float
    machine: Machine
    users: list[UserSample]

    def write(self, path: Path) -> None:
        """As JSON, replacing what was there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n")


def milliseconds(buckets: Buckets, share: float) -> float | None:
    """A quantile of a histogram of seconds."""
    value = buckets.quantile(share)
    return None if value is None else round(1000 * value, 1)


def quantile_ms(values_s: list[float], share: float) -> float | None:
    """A quantile of measured seconds: the smallest value that `share` of them do not exceed."""
    if not values_s:
        return None
    rank = max(0, -int(-share * len(values_s) // 1) - 1)
    return round(1000 * sorted(values_s)[rank], 1)


def show(report: DemoReport, console: Console) -> None:
    """Print the report for people."""
    console.print()
    console.print(Panel.fit(_counts(report), title=f"{report.dataset}: what was read", border_style="dim"))
    console.print(Panel.fit(_quality(report), title="recommendations, each before it was learned", border_style="dim"))
    console.print(Panel.fit(_speed(report), title="freshness and speed", border_style="dim"))
    console.print("Each user's top 10, of the items that are not among the last 50 clicks:", style="dim")
    for user in report.users:
        console.print(Panel.fit(_user(user), title=f"user {user.user_id}, from Redis alone", border_style="dim"))
    machine = report.machine
    console.print(
        f"{machine.cores} cores, {machine.system}, Python {machine.python}, {machine.broker}, {machine.redis}; "
        f"{report.elapsed_s:.0f} s in all",
        style="dim",
        highlight=False,
    )


def _plain(*headers: str) -> Table:
    table = Table(box=None, header_style="dim", show_header=any(headers))
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right")
    return table


def _counts(report: DemoReport) -> Table:
    table = _plain("", "")
    for name, count in (
        ("events sent", report.events_sent),
        ("events read", report.events_read),
        ("learned", report.events_learned),
        ("observed only", report.events_observed),
        ("duplicates", report.events_duplicate),
        ("rejected", report.events_rejected),
        ("checkpoints written", report.checkpoints),
        ("users in Redis", report.users_published),
        ("items in Redis", report.items_published),
    ):
        table.add_row(name, f"{count:,}")
    return table


def _quality(report: DemoReport) -> Table:
    table = _plain("", "all events", "last half", "most popular", "its last half")
    for title, figure in (("Recall@10", "recall"), ("NDCG@10", "ndcg"), ("MRR@10", "mrr")):
        columns = (f"{who}{figure}_at_10{part}" for who in ("", "popularity_") for part in ("", "_last_half"))
        table.add_row(title, *(_figure(getattr(report, column)) for column in columns))
    return table


def _speed(report: DemoReport) -> Table:
    table = _plain("", "p50", "p99")
    paced = f"click to vector in Redis, at {report.paced_events_per_s:,.0f} events/s"
    outside = f"the same seen by a reader ({report.outside_freshness_samples} clicks)"
    table.add_row(paced, _ms(report.freshness_p50_ms), _ms(report.freshness_p99_ms))
    table.add_row(outside, _ms(report.outside_freshness_p50_ms), _ms(report.outside_freshness_p99_ms))
    table.add_row(
        f"backlog while unpaced, at {report.events_per_s:,.0f} events/s",
        _ms(report.backlog_freshness_p50_ms),
        _ms(report.backlog_freshness_p99_ms),
    )
    return table


def _user(user: UserSample) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column("last clicks")
    table.add_column("top 10")
    for row in range(max(len(user.last_clicks), len(user.top))):
        table.add_row(*(titles[row] if row < len(titles) else "" for titles in (user.last_clicks, user.top)))
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"
