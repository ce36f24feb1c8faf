"""The command line: `python -m replay movielens`, `file`, `synthetic` and `demo`."""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import FrameType

from dotenv import dotenv_values

from replay import arguments, demo, kafka_client, progress, runner
from replay.datasets import Dataset, DatasetError, delimited, item_file, movielens
from replay.datasets.base import Table
from replay.datasets.synthetic import Synthetic
from replay.description import described
from replay.kafka_client import KafkaUnavailableError
from replay.lines import LineWriter
from replay.pacing import EventTime, FixedRate, Pacer, Unpaced
from replay.producer import DeliveryError, EventProducer
from replay.runner import Outcome
from replay.stream import Selection

OK, FAILED, INTERRUPTED = 0, 1, 130

_EPILOG = """\
Kafka is found and spoken to as the worker does it: FRESHET_KAFKA__BOOTSTRAP_SERVERS, FRESHET_KAFKA__TOPICS,
FRESHET_KAFKA__ITEMS_TOPIC, FRESHET_KAFKA__SECURITY_PROTOCOL, FRESHET_KAFKA__SASL_MECHANISM, _SASL_USERNAME,
_SASL_PASSWORD, _SSL_CAFILE, _SSL_CERTFILE, _SSL_KEYFILE, _SSL_PASSWORD, _SSL_CHECK_HOSTNAME, in the
environment or in a file that --env-file or FRESHET_ENV_FILE names.
Exit codes: 0 everything was sent and acknowledged, 1 it was not, 2 wrong arguments, 130 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    words = _with_env_file(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(words)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.CRITICAL, stream=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background jobs begin with it ignored
        signal.signal(number, _interrupt)
    try:
        return int(options.run(options))
    except (DatasetError, KafkaUnavailableError) as error:
        _say(str(error))
        return FAILED
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED


def _with_env_file(words: Sequence[str]) -> list[str]:
    """Put the FRESHET_ variables of an env file into the environment, behind what is there; the other arguments."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--env-file", default=os.environ.get("FRESHET_ENV_FILE") or None)
    options, rest = first.parse_known_args(words)
    if options.env_file is not None:
        if not Path(options.env_file).is_file():
            first.exit(2, f"replay: there is no env file {options.env_file}\n")
        for name, value in dotenv_values(options.env_file).items():
            if name.startswith("FRESHET_") and value is not None:
                os.environ.setdefault(name, value)
    return rest


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(message: str) -> None:
    print(f"replay: {message}", file=sys.stderr, flush=True)


# --- what each command replays ---


def _movielens(options: argparse.Namespace) -> Dataset:
    return movielens.load(options.version, options.path, options.cache_dir, options.mirror, _say)


def _file(options: argparse.Namespace) -> Dataset:
    header, skip = not options.no_header, options.skip_bad_lines
    table = delimited.load(options.path, options.columns, options.delimiter, header, skip, _say)
    if options.items is None:
        return table
    return replace(table, descriptions=item_file.load_items(options.items, options.item_columns))


def _synthetic(options: argparse.Namespace) -> Dataset:
    return Synthetic(
        n_events=options.events,
        n_users=options.users,
        n_items=options.items,
        n_clusters=options.clusters,
        seed=options.seed,
        drift_at=options.drift_at,
        interval_s=options.interval_s,
        repeats=options.repeats,
        mode=options.mode,
    )


# --- replaying it ---


def _replay(options: argparse.Namespace) -> int:
    dataset: Dataset = options.load(options)
    selection = _selection(options, dataset)
    if options.stdout:
        return _write(options, dataset, selection)
    security = kafka_client.security_options()
    partitions = options.partitions if options.create_topic else None
    kafka_client.ensure_topic(options.bootstrap_servers, options.topic, partitions, **security)
    if options.items_topic and dataset.items():
        _send_items(options, dataset)
    with ExitStack() as stack:
        producer = stack.enter_context(
            EventProducer(options.bootstrap_servers, options.topic, options.compression, **security)
        )
        advance = stack.enter_context(progress.shown(dataset.name, selection.total(dataset)))
        outcome = runner.replay(dataset, selection, _pacer(options), producer, advance, options.event_type)
    _say(_summary(outcome))
    if outcome.interrupted:
        return INTERRUPTED
    return OK if outcome.error is None else FAILED


def _write(options: argparse.Namespace, dataset: Dataset, selection: Selection) -> int:
    if options.describe and isinstance(dataset, Table):
        sys.stdout.buffer.writelines(described(dataset, whole=selection == Selection()))
    lines = LineWriter(sys.stdout.buffer)
    outcome = runner.replay(dataset, selection, _pacer(options), lines, lambda _: None, options.event_type)
    if outcome.error is not None:
        _say(outcome.error)
    return INTERRUPTED if outcome.interrupted else OK if outcome.error is None else FAILED


def _send_items(options: argparse.Namespace, dataset: Dataset) -> None:
    security = kafka_client.security_options()
    kafka_client.ensure_topic(
        options.bootstrap_servers,
        options.items_topic,
        1 if options.create_topic else None,
        {"cleanup.policy": "compact"},
        **security,
    )
    with EventProducer(options.bootstrap_servers, options.items_topic, options.compression, **security) as to:
        try:
            count = runner.send_items(dataset.items(), to, time.time_ns() // 1_000_000)
        except DeliveryError as error:
            raise KafkaUnavailableError(str(error)) from error
    _say(f"{count:,} items described in {options.items_topic}")


def _selection(options: argparse.Namespace, dataset: Dataset) -> Selection:
    start = options.start_at
    if isinstance(start, datetime):
        start = dataset.index_at(int(start.timestamp() * 1000))
    return Selection(start, options.limit, options.min_rating, options.loop)


def _pacer(options: argparse.Namespace) -> Pacer:
    if options.rate is not None:
        return FixedRate(options.rate)
    return Unpaced() if options.speedup is None else EventTime(options.speedup)


def _summary(outcome: Outcome) -> str:
    sent = f"{outcome.delivered:,} events sent and acknowledged in {outcome.elapsed_s:.1f} s"
    if outcome.go_on_at is None:
        return f"{sent} ({outcome.events_per_s:,.0f} events/s)"
    why = "interrupted" if outcome.error is None else outcome.error
    return f"{why}; {sent}; --start-at {outcome.go_on_at} goes on from there"


# --- arguments ---


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m replay",
        description="Stream a data set into Kafka as click events, keyed by user, in the order they happened.",
        epilog=_EPILOG,
        formatter_class=formatter,
    )
    commands = parser.add_subparsers(title="what to replay", required=True, metavar="COMMAND")
    for name, summary, add, load in _COMMANDS:
        command = commands.add_parser(
            name, help=summary, description=summary, epilog=_EPILOG, formatter_class=formatter
        )
        add(command)
        _add_shared(command)
        command.set_defaults(run=_replay, load=load)
    demo.add_command(commands)
    return parser


def _add_movielens(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--version", choices=list(movielens.VERSIONS), default="100k", help="which MovieLens (default: 100k)")
    add("--path", type=Path, help="read this file, folder or zip instead of downloading")
    add("--cache-dir", type=Path, default=movielens.DEFAULT_CACHE, help="downloads (default: %(default)s)")
    add("--mirror", metavar="URL", default=movielens.HOME, help="where the archives are (default: %(default)s)")


def _add_file(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("path", type=Path, help="CSV, TSV, :: or other delimited text, gzipped or not")
    add(
        "--columns",
        type=arguments.columns,
        metavar="FIELD=COLUMN,…",
        help="user_id=…,item_id=… and where there are any timestamp, value, event_type, event_id; columns by "
        "name, or by number from 1 without a header (default: common names are recognised)",
    )
    add("--delimiter", type=arguments.delimiter, help="between columns, \\t for a tab (default: found out)")
    add("--no-header", action="store_true", help="the first line is data already")
    add(
        "--items",
        type=Path,
        metavar="FILE",
        help="what is known of the items, for --items-topic: id, title, attributes",
    )
    add(
        "--item-columns",
        type=arguments.item_columns,
        metavar="NAME=COLUMN,…",
        help="item_id=…,title=… and attributes (default: id and title by common names, every other column as it is)",
    )
    add("--skip-bad-lines", action="store_true", help="leave lines out that cannot be read, and say how many")


def _add_synthetic(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    for name, default, what in (
        ("events", 100_000, "clicks in all"),
        ("users", 2_000, "users, half of whom appear while the stream runs"),
        ("items", 2_000, "items, likewise"),
        ("clusters", 10, "clusters of items; each user likes one"),
    ):
        add(f"--{name}", type=arguments.positive, default=default, help=f"{what} (default: {default})")
    add("--seed", type=int, default=0, help="another seed, another stream")
    drift = "from event N on, every user likes another cluster; with N,N,… each group of users from its own event on"
    add("--drift-at", type=arguments.naturals, metavar="N[,N…]", help=drift)
    add("--interval-s", type=arguments.above_zero, default=1.0, metavar="S", help="seconds between events (default: 1)")
    add("--repeats", type=arguments.finite, default=0.0, metavar="SHARE", help="clicks on the user's last item again")
    add("--mode", choices=["sessions", "uniform"], default="sessions", help="clicks in a row, or any user each")


def _add_shared(command: argparse.ArgumentParser) -> None:
    _add_pace(command.add_argument_group("pace (default: as fast as possible)").add_mutually_exclusive_group())
    _add_choice(command.add_argument_group("which part"))
    _add_kafka(command.add_argument_group("Kafka"))


def _add_pace(group: argparse._ActionsContainer) -> None:
    group.add_argument("--rate", type=arguments.above_zero, metavar="N", help="N events per second")
    group.add_argument(
        "--speedup", type=arguments.above_zero, metavar="X", help="the events' own times, X times as fast"
    )


def _add_choice(group: argparse._ActionsContainer) -> None:
    add = group.add_argument
    add(
        "--start-at",
        type=arguments.start,
        default=0,
        metavar="N|TIME",
        help="from event N (0 = first) or ISO-8601 time",
    )
    add("--limit", type=arguments.positive, metavar="N", help="N events at most")
    add("--min-rating", type=arguments.finite, metavar="R", help="only events whose rating (value) is R or more")
    add("--loop", action="store_true", help="begin again at the end, until Ctrl-C")
    add("--event-type", metavar="TYPE", help="of all events (default: the data's own, else click)")
    add("--stdout", action="store_true", help="write the records to standard output, one a line; Kafka is left alone")
    add(
        "--describe",
        action="store_true",
        help="with --stdout: what is known of users and items, and the data set's own folds, in lines before them",
    )


def _add_kafka(group: argparse._ActionsContainer) -> None:
    add = group.add_argument
    servers, topic = kafka_client.default_bootstrap_servers(), kafka_client.default_topic()
    items_topic = kafka_client.default_items_topic()
    add("--bootstrap-servers", default=servers, metavar="HOST:PORT,…", help="default: %(default)s")
    add("--topic", default=topic, help="default: %(default)s")
    add("--create-topic", action="store_true", help="create the topic if it is not there")
    add("--partitions", type=arguments.positive, default=1, metavar="N", help="of a topic that is created (default: 1)")
    add(
        "--items-topic",
        default=items_topic,
        metavar="TOPIC",
        help="describe the items (title, attributes) there first, if they are known (default: the worker's, "
        "FRESHET_KAFKA__ITEMS_TOPIC, if it has one)",
    )
    add("--compression", type=arguments.codec, default="lz4", help="lz4, zstd, gzip, snappy or none (default: lz4)")
    add("--verbose", action="store_true", help="show what the Kafka client logs")


_COMMANDS = (
    ("movielens", "MovieLens ratings, downloaded where they are not there yet", _add_movielens, _movielens),
    ("file", "any delimited file of interactions", _add_file, _file),
    ("synthetic", "a made-up stream with a known answer", _add_synthetic, _synthetic),
)

if __name__ == "__main__":
    sys.exit(main())
