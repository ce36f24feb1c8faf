"""The command line: `python -m worker [run | config | check | checkpoints | forget | evaluate | export-onnx]`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from worker.config_view import config_lines, load_settings, settings_table_markdown
from worker.evaluate import command as evaluate
from worker.settings import KafkaSettings, Settings, SettingsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the return value is the exit code."""
    options = _parser().parse_args(arguments)
    try:
        settings = load_settings(options.env_file)
        return int(options.command(settings, options))
    except SettingsError as error:
        return _fail(*error.problems)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker",
        description="Reads events from Kafka, learns from them, publishes vectors to Redis.",
        epilog="Settings come from FRESHET_… variables or an env file; `python -m worker config` lists them all.",
    )
    parser.add_argument("--env-file", type=Path, metavar="FILE", help="read settings from this file too")
    parser.set_defaults(command=_run, fresh=False, drain=False, checkpoint=None, from_timestamp=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_run(commands.add_parser("run", help="run the worker (the default)"))
    config = commands.add_parser("config", help="show the effective settings, where each comes from and what it does")
    config.add_argument("--markdown", action="store_true", help="print the README's table of settings instead")
    config.set_defaults(command=_config)
    check = commands.add_parser("check", help="can Kafka, the topics, Redis, the checkpoints and the device be used?")
    check.set_defaults(command=_check)
    _add_checkpoints(commands.add_parser("checkpoints", help="list, show, verify or prune the checkpoints"))
    evaluate.add_arguments(commands.add_parser("evaluate", help="run the loop over data sets: how good is it?"))
    export = commands.add_parser("export-onnx", help="write a checkpoint's user tower and ranking head as ONNX")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that the files are written to")
    export.add_argument("--checkpoint", metavar="NAME", help="path, file name or number; default: the newest")
    export.set_defaults(command=_export_onnx)
    forget = commands.add_parser("forget", help="have users erased by the worker that reads the topic")
    forget.add_argument("users", nargs="+", metavar="USER", help="user id; after -- one that begins with a dash")
    forget.add_argument("--topic", help="the topic with the users' events; default: the first of the settings")
    forget.set_defaults(command=_forget)
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    start = run.add_mutually_exclusive_group()
    start.add_argument("--fresh", action="store_true", help="start with an empty model although there are checkpoints")
    start.add_argument("--checkpoint", metavar="NAME", help="go back to this checkpoint and read on from there")
    run.add_argument("--from-timestamp", metavar="TIME", help="a fresh start reads from this ISO-8601 time on")
    run.add_argument("--drain", action="store_true", help="stop when there is nothing left to read")
    run.set_defaults(command=_run)


def _add_checkpoints(checkpoints: argparse.ArgumentParser) -> None:
    checkpoints.add_argument("action", nargs="?", choices=("list", "show", "verify", "prune"), default="list")
    checkpoints.add_argument("name", nargs="?", help="show: path, file name or number of a checkpoint")
    checkpoints.add_argument("--keep", type=int, metavar="N", help="prune: how many sound ones to keep")
    checkpoints.set_defaults(command=_checkpoints)


def _run(settings: Settings, options: argparse.Namespace) -> int:
    import structlog

    from worker.redact import secrets_of
    from worker.telemetry import configure_logging

    if options.from_timestamp:
        settings = _starting_at(settings, options.from_timestamp)
    configure_logging(settings.log, secrets_of(settings))
    structlog.get_logger("worker").info("starting")  # what follows takes seconds to import
    from worker.app import Start, run
    from worker.checkpoint import CheckpointError
    from worker.source import SourceError

    start = Start(options.fresh, options.checkpoint, bool(options.from_timestamp))
    try:
        run(settings, start, drain=options.drain)
    except (CheckpointError, SourceError) as error:
        return _fail(str(error))
    return 0


def _starting_at(settings: Settings, time: str) -> Settings:
    try:
        kafka = KafkaSettings.model_validate(settings.kafka.model_dump() | {"start": time})
    except ValueError:
        raise SettingsError([f"--from-timestamp: {time!r} is no ISO-8601 time such as 2026-01-31T08:00:00Z"]) from None
    return settings.model_copy(update={"kafka": kafka})


def _config(settings: Settings, options: argparse.Namespace) -> int:
    if options.markdown:
        print(settings_table_markdown(), end="")
    else:
        print(*config_lines(settings, options.env_file), sep="\n", flush=True)
    return 0


def _check(settings: Settings, _options: argparse.Namespace) -> int:
    from worker.check import run_checks

    return int(run_checks(settings, sys.stdout))


def _forget(settings: Settings, options: argparse.Namespace) -> int:
    from worker.forget import forget
    from worker.source import SourceError

    try:
        return forget(settings, options.users, options.topic, sys.stdout)
    except SourceError as error:
        return _fail(str(error))


def _export_onnx(settings: Settings, options: argparse.Namespace) -> int:
    from worker.checkpoint import CheckpointError, CheckpointFolder
    from worker.checkpoint_view import find_checkpoint, newest_name
    from worker.onnx_export import ExportError, export

    folder = CheckpointFolder(settings.checkpoint.dir, settings.checkpoint.keep)
    try:
        made = export(find_checkpoint(folder, options.checkpoint or newest_name(folder)), options.out)
    except (CheckpointError, ExportError) as error:
        return _fail(str(error))
    print(f"{options.out}: {made['family']}, version {made['version']}, of {made['checkpoint']}")
    return 0


def _checkpoints(settings: Settings, options: argparse.Namespace) -> int:
    from rich.console import Console

    from worker.checkpoint import CheckpointError, CheckpointFolder
    from worker.checkpoint_view import (
        find_checkpoint,
        list_checkpoints,
        newest_name,
        prune_checkpoints,
        show_checkpoint,
    )

    folder = CheckpointFolder(settings.checkpoint.dir, settings.checkpoint.keep)
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)  # names are whole in a pipe
    try:
        if options.action == "show":
            return show_checkpoint(find_checkpoint(folder, options.name or newest_name(folder)), console)
        if options.action == "prune":
            keep = settings.checkpoint.keep if options.keep is None else options.keep
            return prune_checkpoints(folder, console, max(1, keep))
        return list_checkpoints(folder, console, verify=options.action == "verify")
    except CheckpointError as error:
        return _fail(str(error))


def _fail(*problems: str) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
