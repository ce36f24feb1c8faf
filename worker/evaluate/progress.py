"""Shows how far an evaluation is: a bar on a terminal, a line every ten seconds elsewhere. Standard error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_EVERY_S = 10.0
Advance = Callable[[int], None]  # takes the number of events so far


@contextmanager
def shown(what: str, total: int, console: Console, unit: str = "events") -> Iterator[Advance]:
    """Show progress while the block runs."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task(what, total=total)
            yield lambda done: progress.update(task, completed=done)
        return
    yield _lines(what, total, console, unit)


def _lines(what: str, total: int, console: Console, unit: str) -> Advance:
    due = time.monotonic() + _LINE_EVERY_S

    def advance(done: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _LINE_EVERY_S
            console.print(f"{what}: {done:,} of {total:,} {unit}", highlight=False, soft_wrap=True)

    return advance
