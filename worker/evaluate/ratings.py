"""`python -m worker evaluate --objective rating`: how far predicted ratings are from those that were given."""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from model.ratings import MODELS
from model.ratings.data import Split, fold_split, random_folds, random_split
from model.ratings.errors import mae, rmse
from model.ratings.training import Report, choose, refit
from worker.device import set_up_device
from worker.evaluate import report
from worker.evaluate.dataset import Dataset, EvaluationError
from worker.evaluate.evaluation import named_datasets
from worker.evaluate.progress import shown
from worker.evaluate.rating_data import RatingData, read_rating_data
from worker.settings import Settings

Row = dict[str, Any]
SPLITS = ("random", "folds")


@dataclass(frozen=True, slots=True)
class RatingPlan:
    """What is to be learned and how the ratings are split."""

    models: tuple[str, ...] = tuple(MODELS)
    splits: tuple[str, ...] = SPLITS
    seeds: tuple[int, ...] = (0, 1, 2)  # of the random splits; the folds take the first

    def __post_init__(self) -> None:
        for what, given, known in (("model", self.models, MODELS), ("split", self.splits, SPLITS)):
            unknown = [name for name in given if name not in known]
            if unknown or not given:
                raise EvaluationError(f"no {what} {', '.join(unknown)}; there are: {', '.join(known)}")
        if not self.seeds or min(self.seeds) < 0:
            raise EvaluationError(f"--seeds {','.join(map(str, self.seeds))}: numbers from 0 on are needed")


def run_ratings(settings: Settings, options: argparse.Namespace, command: str) -> int:
    """Learn, predict, print a table, write rows (JSON) and the table beside them (Markdown); the exit code.

    What is done already is on the disk at any moment. Raises EvaluationError for a wrong word, and where a data set
    has no ratings.
    """
    plan, console = _plan(options), Console(stderr=True)
    datasets, device = named_datasets(options), set_up_device(settings.runtime)
    head = {"command": command, "made": datetime.now(UTC).isoformat(timespec="seconds"), "machine": report.machine()}
    rows: list[Row] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for dataset in datasets:
        for row in rating_rows(dataset.name, _read(dataset, console), plan, device, console):
            rows.append({**row, "command": command})
            options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
        Console(width=None if Console().is_terminal else 120).print(_table(dataset.name, rows))
    options.out.with_suffix(".md").write_text(f"`{command}`\n\n{markdown(rows)}")
    console.print(f"written: {options.out}, {options.out.with_suffix('.md')}", highlight=False, soft_wrap=True)
    return 0


def _plan(options: argparse.Namespace) -> RatingPlan:
    given = [name.strip() for name in options.model.split(",") if name.strip()]
    try:
        seeds = tuple(int(seed) for seed in options.seeds.split(",") if seed.strip())
    except ValueError:
        raise EvaluationError(f"--seeds {options.seeds}: whole numbers separated by commas are allowed") from None
    splits = SPLITS if options.split is None else (options.split,)
    return RatingPlan(tuple(given) or tuple(MODELS), splits, seeds or RatingPlan().seeds)


def _read(dataset: Dataset, console: Console) -> RatingData:
    described = replace(dataset, command=(*dataset.command, "--describe"))
    with tempfile.TemporaryDirectory(prefix="freshet-") as folder:
        path = Path(folder) / "ratings.jsonl"
        with path.open("wb") as file:
            said = described.write(file)
        for line in said:
            console.print(line, highlight=False, soft_wrap=True)
        data = read_rating_data(path, dataset.name)
    if data.repeated:
        console.print(f"{dataset.name}: {data.repeated:,} ratings were given again later; the last of each pair counts")
    return data


def rating_rows(name: str, data: RatingData, plan: RatingPlan, device: torch.device, console: Console) -> Iterator[Row]:
    """A row a model, split and seed, as each is done."""
    kinds = [MODELS[model] for model in plan.models if data.side or not MODELS[model].uses_side]
    for left_out in set(plan.models) - {kind.name for kind in kinds}:
        console.print(f"{name}: nothing is known beside the ratings, so {left_out} is left out", highlight=False)
    for split in _splits(data, plan):
        for kind in kinds:
            epochs = sum(settings.max_epochs for settings in kind.candidates)
            with shown(f"{kind.name}, {split.name}, seed {split.seed}", epochs, console, "epochs") as advance:
                row = rating_row(data, kind.name, split, device, _counted(advance))
            yield {"dataset": name, **row}


def _counted(advance: Callable[[int], None]) -> Report:
    done = 0

    def report(_model: str, _epoch: int, _error: float) -> None:
        nonlocal done
        done += 1
        advance(done)

    return report


def rating_row(data: RatingData, model: str, split: Split, device: torch.device, report: Report) -> Row:
    """Errors on one split's test ratings.

    1. Each candidate learns from the training ratings; the validation ratings choose one of them, and its epoch.
    2. The chosen one learns anew from both for as many epochs: what chose is no test, so it need not be wasted.
    3. Only then the test ratings are looked at: for both models' errors, and nothing else.
    """
    began = time.perf_counter()
    train, validation = data.ratings.part(split.train), data.ratings.part(split.validation)
    fitted = choose(MODELS[model], train, validation, data.side, seed=split.seed, device=device, report=report)
    known = data.ratings.part(np.concatenate([split.train, split.validation]))
    final = refit(fitted, known, data.side, seed=split.seed, device=device, report=report)
    test = data.ratings.part(split.test)
    predicted, before = (each.predict(test.users, test.items) for each in (final, fitted))
    return {
        "objective": "rating",
        "split": split.name,
        "model": model,
        "seed": split.seed,
        "rmse": rmse(predicted, test.values),
        "mae": mae(predicted, test.values),
        "rmse_without_refit": rmse(before, test.values),
        "mae_without_refit": mae(before, test.values),
        "validation_rmse": fitted.validation_rmse,
        "epochs": fitted.epochs,
        "settings": asdict(fitted.settings),
        "tried": [{"settings": asdict(settings), "validation_rmse": error} for settings, error in fitted.tried],
        "ratings": {"train": len(train), "validation": len(validation), "test": len(test)},
        "seconds": time.perf_counter() - began,
        "device": str(device),
    }


def _splits(data: RatingData, plan: RatingPlan) -> Iterator[Split]:
    count = len(data.ratings)
    if "random" in plan.splits:
        yield from (random_split(count, seed) for seed in plan.seeds)
    if "folds" in plan.splits:
        seed = plan.seeds[0]
        made_up = {f"random fold {n}": test for n, test in enumerate(random_folds(count, seed), 1)}
        for name, test in (data.folds or made_up).items():
            yield fold_split(name, test, count, seed)


# --- the table ---


def summary(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line a model and kind of split, as `_HEADER` names its cells; seeds and folds are averaged."""
    lines: list[tuple[str, ...]] = []
    for random in (True, False):
        chosen = [row for row in rows if (row["split"] == "random") is random]
        models = dict.fromkeys(row["model"] for row in chosen)
        lines.extend(_averaged([row for row in chosen if row["model"] == model]) for model in models)
    return lines


def _averaged(rows: Sequence[Row]) -> tuple[str, ...]:
    names = list(dict.fromkeys(row["split"] for row in rows))
    errors = [row["rmse"] for row in rows]
    split = f"random 80/20, {len(rows)} seeds" if names == ["random"] else f"{names[0]} to {names[-1]}, averaged"
    return (
        MODELS[rows[0]["model"]].label,
        split,
        f"{statistics.mean(errors):.4f}",
        f"{statistics.stdev(errors):.4f}" if len(errors) > 1 else "",
        f"{statistics.mean(row['mae'] for row in rows):.4f}",
        f"{statistics.mean(row['rmse_without_refit'] for row in rows):.4f}",
        f"{statistics.mean(row['epochs'] for row in rows):.0f}",
        f"{statistics.mean(row['seconds'] for row in rows):.0f}",
    )


_HEADER = ("model", "split", "RMSE", "±", "MAE", "RMSE without validation part", "epochs", "s a run")


def _table(name: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"{name}: errors on test ratings, which chose nothing")
    for column in _HEADER:
        table.add_column(column, justify="left" if column in _HEADER[:2] else "right")
    for line in summary([row for row in rows if row["dataset"] == name]):
        table.add_row(*line)
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The table of each data set as Markdown, each fold's and seed's errors below."""
    lines: list[str] = []
    for name in dict.fromkeys(row["dataset"] for row in rows):
        chosen = [row for row in rows if row["dataset"] == name]
        each = [(r["model"], r["split"], str(r["seed"]), f"{r['rmse']:.4f}", f"{r['mae']:.4f}") for r in chosen]
        lines += [f"## {name}", "", *_markdown_table(_HEADER, summary(chosen)), ""]
        lines += [*_markdown_table(("model", "split", "seed", "RMSE", "MAE"), each), ""]
    return "\n".join(lines)


def _markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = ("---", "---", *(["---:"] * (len(header) - 2)))
    return ["| " + " | ".join(line) + " |" for line in (header, rule, *lines)]
