"""`python -m worker checkpoints`: list, show, verify and prune, for people."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from worker.checkpoint import CheckpointError, CheckpointFolder, FormatError, Header, Saved, load


def list_checkpoints(folder: CheckpointFolder, console: Console, *, verify: bool) -> int:
    """One line each, newest first; with `verify` each is read whole. Returns 1 when one is damaged."""
    table = Table(Column("checkpoint", no_wrap=True), "saved (UTC)", "records", "MB", "positions", "state", box=None)
    damaged = 0
    for saved in _all(folder):
        problem = saved.problem or (_problem(saved) if verify else "")
        damaged += bool(problem)
        state = problem or ("sound" if verify else "not verified")
        table.add_row(saved.path.name, *_summary(saved), escape(state))
    console.print(table)
    return 1 if damaged else 0


def show_checkpoint(path: Path, console: Console) -> int:
    """What one checkpoint holds: header, settings and table sizes; reads it whole. CheckpointError when damaged."""
    saved, state = load(path)
    header = saved.header
    if header is None:
        raise CheckpointError(f"{path}: {saved.problem}")
    lines: dict[str, Any] = {
        "format": header.format,
        "saved (UTC)": _when(header),
        "epoch": header.epoch,
        "records read": header.records,
        "events by outcome": header.counts,
        "positions (next offset)": {f"{topic}/{partition}": offset for topic, partition, offset in header.positions},
        "users": int((state["learner"]["users"]["lengths"] >= 0).sum()),
        "items": int((state["learner"]["items"]["lengths"] >= 0).sum()),
        "optimizer steps": state["learner"]["steps"],
        "events in the filling mini-batch": len(state["learner"]["pending"]["users"]),
        "users waiting to be published": len(state["outbox"]["users"]),
        "settings of the model": header.model,
    }
    for name, value in lines.items():
        console.print(f"[bold]{name}[/bold]: {escape(value if isinstance(value, str) else json.dumps(value))}")
    return 0


def prune_checkpoints(folder: CheckpointFolder, console: Console, keep: int) -> int:
    """Delete all but the `keep` newest sound ones; damaged ones go too, unless nothing would be left.

    What another version wrote stays, and so does what a worker saves while this looks at the folder.
    """
    there = [saved for saved in _all(folder) if not _is_foreign(saved)]
    sound = [saved for saved in there if not (saved.problem or _problem(saved))]
    if not sound:
        raise CheckpointError(f"no checkpoint in {folder.path} is sound; nothing was deleted")
    kept = {saved.path for saved in sound[:keep]}
    for saved in there:
        if saved.path not in kept:
            saved.path.unlink(missing_ok=True)  # the worker's own retention may have been faster
            console.print(f"deleted {saved.path.name}")
    return 0


def find_checkpoint(folder: CheckpointFolder, name: str) -> Path:
    """The checkpoint with this path, file name or number. CheckpointError when there is none."""
    candidates = [Path(name), folder.path / name, folder.path / f"checkpoint-{name.zfill(10)}.pt"]
    for path in candidates:
        if path.is_file():
            return path
    there = ", ".join(saved.path.name for saved in folder.list()) or "none"
    raise CheckpointError(f"there is no checkpoint {name!r}; in {folder.path}: {there}")


def newest_name(folder: CheckpointFolder) -> str:
    """File name of the newest checkpoint; empty when there is none."""
    return next((saved.path.name for saved in folder.list()), "")


def _all(folder: CheckpointFolder) -> list[Saved]:
    if saved := folder.list():
        return saved
    raise CheckpointError(f"there is no checkpoint in {folder.path}")


def _problem(saved: Saved) -> str:
    try:
        load(saved.path)
    except CheckpointError as error:
        return str(error)
    return ""


def _is_foreign(saved: Saved) -> bool:
    """Whole or not, this version cannot know."""
    try:
        load(saved.path)
    except FormatError:
        return True
    except CheckpointError:
        pass
    return False


def _summary(saved: Saved) -> tuple[str, str, str, str]:
    header = saved.header
    if header is None:
        return "", "", f"{saved.bytes / 1e6:.1f}", ""
    positions = " ".join(f"{topic}/{partition}:{offset}" for topic, partition, offset in header.positions)
    return _when(header), f"{header.records:,}", f"{saved.bytes / 1e6:.1f}", positions


def _when(header: Header) -> str:
    return datetime.fromtimestamp(header.created_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
