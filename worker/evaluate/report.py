"""An evaluation as JSON, as a Markdown table and as a table for the terminal."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from worker.evaluate.rows import Row

_COLUMNS: Sequence[tuple[str, str, str]] = (  # head, field, format
    ("Recall@10", "recall_at_10", ".4f"),
    ("last half", "recall_at_10_last_half", ".4f"),
    ("NDCG@10", "ndcg_at_10", ".4f"),
    ("MRR@10", "mrr_at_10", ".4f"),
    ("new items", "recall_at_10_few_clicks", ".4f"),
    ("coverage", "coverage", ".2f"),
    ("novelty, bits", "novelty_bits", ".1f"),
    ("repetition", "repetition", ".2f"),
    ("diversity", "diversity", ".2f"),
    ("events/s", "events_per_s", ",.0f"),
    ("seed", "seed", "d"),
)
_LEGEND = """\
Each event is ranked before it is learned, among all items that have appeared and that its user has not clicked;
an item that has never been seen is a miss. new items: Recall@10 on clicks of items with fewer than five clicks so
far. coverage: share of all items that were in anyone's top 10. novelty: mean self-information of what was
recommended. repetition: share of a top 10 that was in the same user's top 10 before. diversity: 1 minus the mean cosine
between the items of a top 10, by who clicked them. events/s: reading, ranking and learning, in one process."""


def machine() -> dict[str, str]:
    """What it ran on."""
    return {
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def write_json(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> None:
    """Everything, whole at any moment."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({**head, "rows": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def write_markdown(path: Path, head: dict[str, Any], rows: Sequence[Row], plots: Iterable[Path]) -> None:
    """A table for each data set, how it was made, and the plots."""
    lines = ["# Evaluation", "", f"`{head['command']}`", ""]
    on = head["machine"]
    lines += [f"{on['cpu']}, {on['cores']} cores; {on['system']}; Python {on['python']}.", ""]
    for name in dict.fromkeys(row["dataset"] for row in rows):
        of = [row for row in rows if row["dataset"] == name]
        lines += [f"## {name}", "", f"{of[0]['events']:,} events{_selected(of[0])}.", "", *_table(of), ""]
        lines += [sentence for sentence in (best_peer(of), *uplifts(of)) if sentence]
    lines += ["", _LEGEND, "", *(f"![{plot.stem}]({plot.name})\n" for plot in plots)]
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _selected(row: Row) -> str:
    return "".join(f", {name.replace('_', ' ')} {value}" for name, value in row["selection"].items())


def _table(rows: Sequence[Row]) -> list[str]:
    heads = ["", *(head for head, _, _ in _COLUMNS)]
    body = [[_named(row), *_cells(row)] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *body)]


def _named(row: Row) -> str:
    return f"**{row['name']}** (default)" if row["default"] else str(row["name"])


def _cells(row: Row) -> list[str]:
    return [format(row[field], form) for _, field, form in _COLUMNS]


def best_peer(rows: Sequence[Row]) -> str | None:
    """How the shipped default, else the first row, compares with the best of the peers; None without a peer."""
    peers = [row for row in rows if row["kind"] == "peer" and row["name"] != "popularity"]
    own = [row for row in rows if row["kind"] == "freshet"]
    if not peers or not own:
        return None
    mine = next((row for row in own if row["default"]), own[0])
    ratios = []
    for field in ("recall_at_10", "recall_at_10_last_half"):
        best = max(peers, key=lambda row: float(row[field]))
        ratios.append(f"{mine[field] / max(best[field], 1e-9):.3f} times {best['name']}")
    return f"Recall@10 of {mine['name']}: {ratios[0]}; last half {ratios[1]}."


def uplifts(rows: Sequence[Row]) -> list[str]:
    """What being online is worth, for each model that was frozen by day."""
    found = [row["uplift"] for row in rows if "uplift" in row]
    return [
        f"Online against {gain['over']}: Recall@10 {_signed(gain['recall_at_10'])}, "
        f"last half {_signed(gain['recall_at_10_last_half'])}."
        for gain in found
    ]


def _signed(gain: float | None) -> str:
    return "from nothing" if gain is None else f"{gain:+.0%}"


def terminal_table(name: str, rows: Sequence[Row]) -> Table:
    """The rows of one data set."""
    table = Table(title=name, title_justify="left")
    table.add_column("")
    for head, _, _ in _COLUMNS:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(_named(row).replace("*", ""), *_cells(row))
    return table
