"""An evaluation from its arguments to its files."""

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from worker.evaluate import nightly, plots, progress, report
from worker.evaluate.command import reading_words, selection
from worker.evaluate.dataset import Dataset, EvaluationError, Reading, find
from worker.evaluate.peers.base import peer_row
from worker.evaluate.peers.catalogue import chosen, made
from worker.evaluate.rows import Row, worker_row
from worker.evaluate.stream import EventStream, Records, read_stream
from worker.evaluate.variants import Variant, parse_changes, parse_variant, variants, with_seeds
from worker.settings import Settings, SettingsError


class Evaluation:
    """Each data set by each variant and peer; what is done already is on the disk at any moment."""

    def __init__(self, settings: Settings, options: argparse.Namespace, folder: Path, command: str) -> None:
        self._options, self._folder, self._settings = options, folder, settings
        self._console = Console(stderr=True)
        self._variants = _variants(settings, options)
        self._peers = chosen(options.peers, _names(options.peer))
        self._datasets = named_datasets(options)
        self._selection = selection(options)
        self._rows: list[Row] = []
        self._head: dict[str, Any] = {
            "command": command,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": report.machine(),
        }

    def run(self) -> int:
        """All of it; the exit code."""
        options = self._options
        options.out.parent.mkdir(parents=True, exist_ok=True)
        for dataset in self._datasets:
            self._dataset(dataset)
        pictures: list[Path] = []
        if not options.no_plots and plots.available():
            pictures = plots.draw(options.out, self._rows)
        elif not options.no_plots:
            self._say("no plots: matplotlib is not there (pip install 'freshet[evaluate]')")
        markdown = options.out.with_suffix(".md")
        report.write_markdown(markdown, self._head, self._rows, pictures)
        self._say(f"written: {', '.join(map(str, (options.out, markdown, *pictures)))}")
        return 0

    def _dataset(self, dataset: Dataset) -> None:
        path = self._folder / "records.jsonl"
        self._say(f"reading {dataset.name}")
        with path.open("wb") as file:
            for line in dataset.write(file):
                self._say(line)
        records = Records(path)
        try:
            stream = read_stream(records, self._settings.events)
            if self._options.nightly:
                nightly.days(stream)  # fails before anything has run
        except EvaluationError as error:
            raise EvaluationError(f"{dataset.name}: {error}") from None
        before = len(self._rows)
        for variant in self._variants:
            with progress.shown(f"{dataset.name}: {variant.name}", len(stream), self._console) as advance:
                self._add(dataset, worker_row(variant, records, stream, advance))
        if self._options.nightly:
            self._nightly(dataset, stream)
        for name in self._peers:
            self._peer(dataset, stream, name)
        rows = self._rows[before:]
        Console(width=None if Console().is_terminal else 200).print(report.terminal_table(dataset.name, rows))
        for sentence in filter(None, (report.best_peer(rows), *report.uplifts(rows))):
            print(sentence, flush=True)

    def _nightly(self, dataset: Dataset, stream: EventStream) -> None:
        variant, online = self._variants[0], self._rows[-len(self._variants)]
        for fresh in (False, True):
            with progress.shown(f"{dataset.name}: {variant.name}, nightly", len(stream), self._console) as advance:
                row = nightly.nightly_row(variant, stream, advance, fresh=fresh)
            self._add(dataset, {**row, "uplift": nightly.uplift(online, row)})

    def _peer(self, dataset: Dataset, stream: EventStream, name: str) -> None:
        with progress.shown(f"{dataset.name}: {name}", len(stream), self._console) as advance:
            self._add(dataset, peer_row(lambda of: made(name, of), stream, advance))

    def _add(self, dataset: Dataset, row: Row) -> None:
        place = {"dataset": dataset.name, "selection": self._selection}
        self._rows.append({**place, **row, "command": self._head["command"]})
        report.write_json(self._options.out, self._head, self._rows)

    def _say(self, message: str) -> None:
        self._console.print(message, highlight=False, soft_wrap=True, markup=False)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _variants(settings: Settings, options: argparse.Namespace) -> list[Variant]:
    changes = [parse_changes(text, "--set") for text in options.set]
    named = [parse_variant(text) for text in options.variant]
    return with_seeds(variants(settings, _names(options.family), changes, named), _seeds(options.seeds))


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in _names(text)]
    except ValueError:
        raise SettingsError([f"--seeds {text}: whole numbers separated by commas are allowed"]) from None


def named_datasets(options: argparse.Namespace) -> list[Dataset]:
    """The data sets that the arguments name. Raises EvaluationError where one is not there."""
    given = options.datasets or (["file"] if options.path else [])
    if not given:
        raise EvaluationError("name a data set, such as movielens-100k, or give --path; --help says more")
    if options.path and len(given) > 1:
        raise EvaluationError("--path goes with one data set")
    reading = Reading(options.path, reading_words(options))
    return [find(name, reading) for name in given]
