"""The command line: `python -m worker [run | config | check | checkpoints]`."""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from worker.config_view import config_lines, load_settings, settings_table_markdown
from worker.settings import Settings, SettingsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the return value is the exit code."""
    options = _parser().parse_args(arguments)
    try:
        settings = load_settings(options.env_file)
        return int(options.command(settings, options))
    except SettingsError as error:
        return _fail(*error.problems)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker",
        description="Reads events from Kafka, learns from them, publishes vectors to Redis.",
        epilog="Settings come from FRESHET_… variables or an env file; `python -m worker config` lists them all.",
    )
    parser.add_argument("--env-file", type=Path, metavar="FILE", help="read settings from this file too")
    parser.set_defaults(command=_run, fresh=False, drain=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    run = commands.add_parser("run", help="run the worker (the default)")
    run.add_argument("--fresh", action="store_true", help="start with an empty model although there are checkpoints")
    run.add_argument("--drain", action="store_true", help="stop when there is nothing left to read")
    run.set_defaults(command=_run)
    config = commands.add_parser("config", help="show the effective settings, where each comes from and what it does")
    config.add_argument("--markdown", action="store_true", help="print the README's table of settings instead")
    config.set_defaults(command=_config)
    check = commands.add_parser("check", help="can Kafka, the topics, Redis, the checkpoints and the device be used?")
    check.set_defaults(command=_check)
    checkpoints = commands.add_parser("checkpoints", help="list the checkpoints; verify reads them whole")
    checkpoints.add_argument("action", nargs="?", choices=("list", "verify"), default="list")
    checkpoints.set_defaults(command=_checkpoints)
    return parser


def _run(settings: Settings, options: argparse.Namespace) -> int:
    from worker.app import run
    from worker.checkpoint import CheckpointError
    from worker.redact import secrets_of
    from worker.source import SourceError
    from worker.telemetry import configure_logging

    configure_logging(settings.log, secrets_of(settings))
    try:
        run(settings, fresh=options.fresh, drain=options.drain)
    except (CheckpointError, SourceError) as error:
        return _fail(str(error))
    return 0


def _config(settings: Settings, options: argparse.Namespace) -> int:
    if options.markdown:
        print(settings_table_markdown(), end="")
    else:
        print(*config_lines(settings, options.env_file), sep="\n")
    return 0


def _check(settings: Settings, _options: argparse.Namespace) -> int:
    from worker.check import run_checks

    return run_checks(settings, sys.stdout)


def _checkpoints(settings: Settings, options: argparse.Namespace) -> int:
    from worker.checkpoint import CheckpointError, CheckpointFolder, load

    saved = CheckpointFolder(settings.checkpoint.dir, settings.checkpoint.keep).list()
    if not saved:
        return _fail(f"there is no checkpoint in {settings.checkpoint.dir}")
    table = Table("checkpoint", "saved (UTC)", "records", "positions", "MB", "state", box=None)
    damaged = 0
    for one in saved:
        problem = one.problem
        if options.action == "verify" and not problem:
            try:
                load(one.path)
            except CheckpointError as error:
                problem = str(error)
        damaged += bool(problem)
        when, records, positions = "", "", ""
        if one.header is not None:
            when = datetime.fromtimestamp(one.header.created_ms / 1000, UTC).isoformat(" ", "seconds")[:19]
            records = f"{one.header.records:,}"
            positions = " ".join(f"{topic}/{partition}:{offset}" for topic, partition, offset in one.header.positions)
        state = problem or ("sound" if options.action == "verify" else "")
        table.add_row(one.path.name, when, records, positions, f"{one.bytes / 1e6:.1f}", state)
    Console().print(table)
    return 1 if damaged else 0


def _fail(*problems: str) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
