"""Shows how far a replay is: a bar on a terminal, a plain line every few seconds elsewhere. Standard error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.progress import TimeRemainingColumn as Remaining
from rich.text import Text

_LINE_EVERY_S = 5.0
_UPDATE_EVERY_S = 0.1

Advance = Callable[[int], None]  # takes the number of events so far


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} events/s", style="progress.data.speed")


@contextmanager
def shown(what: str, total: int | None, console: Console | None = None) -> Iterator[Advance]:
    """Show progress while the block runs; call what it gives with the number of events so far."""
    console = console or Console(stderr=True)
    kind = _bar if console.is_terminal else _lines
    with kind(what, total, console) as show, _now_and_then(show) as advance:
        yield advance


@contextmanager
def _bar(what: str, total: int | None, console: Console) -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), Remaining())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def _lines(what: str, total: int | None, console: Console) -> Iterator[Advance]:
    first: tuple[float, int] | None = None  # when, and how many there were already
    due = time.monotonic() + _LINE_EVERY_S

    def show(done: int) -> None:
        nonlocal due, first
        now = time.monotonic()
        began, before = first = first or (now, done)
        if now >= due:
            due = now + _LINE_EVERY_S
            rate = (done - before) / (now - began) if now > began else 0.0
            console.print(line(what, done, total, rate), highlight=False, soft_wrap=True)

    yield show


def line(what: str, done: int, total: int | None, rate: float) -> str:
    """`ml-100k: 20,000 of 100,000 events, 4,000 events/s, 20 s left`."""
    of = "" if total is None else f" of {total:,}"
    left = "" if total is None or rate <= 0 else f", {(total - done) / rate:,.0f} s left"
    return f"{what}: {done:,}{of} events, {rate:,.0f} events/s{left}"


@contextmanager
def _now_and_then(show: Advance) -> Iterator[Advance]:
    """Pass a count on ten times a second, as showing it costs more than sending an event; the last one, too."""
    due, newest = 0.0, 0

    def advance(done: int) -> None:
        nonlocal due, newest
        newest = done
        now = time.monotonic()
        if now >= due:
            due = now + _UPDATE_EVERY_S
            show(done)

    try:
        yield advance
    finally:
        show(newest)
