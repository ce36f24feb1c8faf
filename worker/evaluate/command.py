"""The command line of `python -m worker evaluate`."""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker.settings import LogSettings, Settings

_DESCRIPTION = """\
Run the worker's own loop over data sets at full speed, rank each event before it is learned, and say how good that
was: Recall, NDCG and MRR at 10, over time, and what the lists are like. The most popular items are always beside it.
Settings come from the environment as they do for the worker."""
_EPILOG = """\
DATASET: movielens-100k (or 1m, 10m, …), synthetic, synthetic:events=20000,drift_at=10000, or the path of a file.
  python -m worker evaluate movielens-100k --peers
  python -m worker evaluate clicks.csv --columns user_id=user,item_id=product --limit 100000
  python -m worker evaluate movielens-100k --family two_tower,mf --variant small:dim=32,replay=1 --seeds 0,1,2"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("datasets", nargs="*", metavar="DATASET", help="a name or the path of a file")
    _add_reading(parser.add_argument_group("what is read"))
    _add_rows(parser.add_argument_group("what is compared"))
    _add_ratings(parser.add_argument_group("explicit ratings: models learned in batch, in place of the worker's loop"))
    parser.add_argument("--out", type=Path, default=Path("reports/evaluate.json"), help="default: %(default)s")
    parser.add_argument("--no-plots", action="store_true", help="write no pictures")
    parser.set_defaults(command=evaluate)


def _add_reading(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--path", type=Path, help="the file, folder or archive of the data set")
    add("--columns", metavar="FIELD=COLUMN,…", help="user_id=…,item_id=… and others, as `replay file` has it")
    add("--delimiter", help="between columns (default: found out)")
    add("--no-header", action="store_true", help="the first line is data already")
    add("--skip-bad-lines", action="store_true", help="leave lines out that cannot be read")
    add("--min-rating", metavar="R", help="only events whose value is R or more")
    add("--start-at", metavar="N|TIME", help="from event N or an ISO-8601 time")
    add("--limit", metavar="N", help="N events at most")
    add("--event-type", metavar="TYPE", help="of all events")


def _add_rows(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--family", default="", metavar="NAME,…", help="a row for each model family (default: that of the settings)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all rows: model.replay=1")
    add("--variant", action="append", default=[], metavar="NAME:SETTING=VALUE,…", help="one more row")
    add("--seeds", default="", metavar="N,…", help="each row once for each seed")
    add("--nightly", action="store_true", help="the first row's model, too, trained each night and frozen by day")
    add("--peers", action="store_true", help="all peers too: other recommenders on the same events")
    add("--peer", default="", metavar="NAME,…", help="these peers too")


def _add_ratings(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--objective", choices=("click", "rating"), default="click", help="rating: RMSE and MAE of predicted ratings")
    add("--model", default="", metavar="NAME,…", help="rating: only these models, e.g. biases,mf,gnn")
    add("--split", choices=("random", "folds"), help="rating: only random 80/20 splits, or only the five folds")


def evaluate(settings: Settings, options: argparse.Namespace) -> int:
    """Run the evaluation that the arguments ask for; the exit code."""
    from worker.evaluate.dataset import EvaluationError
    from worker.evaluate.evaluation import Evaluation
    from worker.evaluate.ratings import run_ratings
    from worker.redact import secrets_of
    from worker.telemetry import configure_logging

    configure_logging(LogSettings(level="warning", format=settings.log.format), secrets_of(settings))
    try:
        if options.objective == "rating":
            return run_ratings(settings, options, command_line())
        with tempfile.TemporaryDirectory(prefix="freshet-") as folder:
            return Evaluation(settings, options, Path(folder), command_line()).run()
    except EvaluationError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 2


def command_line(words: Sequence[str] | None = None) -> str:
    """The command that makes the same again."""
    return shlex.join(["python", "-m", "worker", *(sys.argv[1:] if words is None else words)])


def reading_words(options: argparse.Namespace) -> tuple[str, ...]:
    """What is read, in the words of the replay tool."""
    given: dict[str, Any] = vars(options)
    values = ("columns", "delimiter", "min_rating", "start_at", "limit", "event_type")
    flags = ("no_header", "skip_bad_lines")
    words = [f"--{name.replace('_', '-')}={given[name]}" for name in values if given[name] is not None]
    return (*words, *(f"--{name.replace('_', '-')}" for name in flags if given[name]))


def selection(options: argparse.Namespace) -> dict[str, str]:
    """What of a data set was left out, for the report."""
    names = ("min_rating", "start_at", "limit", "event_type")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}
