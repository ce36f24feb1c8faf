"""What people see while events are sent."""

import io

from rich.console import Console

from replay.progress import line, shown


def test_a_line_has_count_rate_and_time_left() -> None:
    assert line("ml-100k", 20_000, 100_000, 4000.0) == "ml-100k: 20,000 of 100,000 events, 4,000 events/s, 20 s left"


def test_a_line_without_an_end_or_a_rate_leaves_out_what_it_cannot_know() -> None:
    assert line("ml", 20_000, None, 4000.0) == "ml: 20,000 events, 4,000 events/s"
    assert line("ml", 0, 10, 0.0) == "ml: 0 of 10 events, 0 events/s"


def test_a_terminal_gets_a_bar_that_ends_at_the_last_count() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    with shown("ml-100k", 50, console) as advance:
        for done in range(1, 51):
            advance(done)
    assert "50/50" in output.getvalue()


def test_elsewhere_a_short_replay_prints_nothing() -> None:
    output = io.StringIO()
    with shown("ml-100k", 50, Console(file=output)) as advance:
        advance(50)
    assert output.getvalue() == ""
