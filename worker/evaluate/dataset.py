"""Data sets by name or path, as `python -m replay` reads them: it runs beside and writes its records down."""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

NAMES = "movielens-100k (or another version), synthetic, file"
_ARCHIVES = (".zip", ".whl")


class EvaluationError(Exception):
    """Why there is nothing to report; one line for the user."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Which part of a data set is read, and how it lies there; words for the replay tool."""

    path: Path | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dataset:
    """A stream of events that can be read again."""

    name: str
    command: tuple[str, ...]  # of the replay tool

    def write(self, to: BinaryIO) -> list[str]:
        """Write its records to a file, one a line; returns what the replay tool had to say.

        Raises EvaluationError with the tool's own words where it fails.
        """
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", "replay", *self.command, "--stdout"],
            stdout=to,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            check=False,
        )
        said = [line for line in done.stderr.splitlines() if line.strip()]
        if done.returncode:
            why = said[-1] if said else f"the replay tool ended with {done.returncode}"
            raise EvaluationError(f"{self.name}: {why}")
        return said


def find(given: str, reading: Reading) -> Dataset:
    """The data set of a name or path. EvaluationError says which there are."""
    name, _, options = given.partition(":")
    path = reading.path
    if name.startswith("movielens-"):
        where = () if path is None else ("--path", str(path))
        return Dataset(given, ("movielens", "--version", name.removeprefix("movielens-"), *where, *reading.words))
    if name == "synthetic":
        return Dataset(given, ("synthetic", *_synthetic(given, options), *reading.words))
    if path is None and name != "file":
        path = Path(given)
    if path is None:
        raise EvaluationError("file: say which, with --path")
    if not path.exists():
        raise EvaluationError(f"{given}: neither the path of a file nor one of {NAMES}")
    if path.is_dir() or path.suffix in _ARCHIVES:
        return Dataset(given, ("movielens", "--path", str(path), *reading.words))
    return Dataset(given, ("file", str(path), *reading.words))


def _synthetic(given: str, options: str) -> Sequence[str]:
    """`events=5000,drift_at=2000` as words for the replay tool."""
    words: list[str] = []
    # a comma before a number goes on with a list: drift_at=1000,2000
    for pair in filter(None, re.split(r",(?!\d)", options)):
        key, is_pair, value = pair.partition("=")
        if not (is_pair and key and value):
            raise EvaluationError(f"{given}: {pair!r} is no KEY=VALUE; `python -m replay synthetic --help` lists them")
        words += [f"--{key.replace('_', '-')}", value]
    return words
