"""Is a saved state of one moment? Every table beside another has the same rows, every count the same events."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from worker.checkpoint import Saved

State = dict[str, Any]


def ids_of(table: State) -> dict[str, int]:
    """External id → row, of a saved id table."""
    ends = table["lengths"].clamp_min(0).cumsum(0).tolist()
    text = table["text"].numpy().tobytes()
    lengths = enumerate(zip(ends, table["lengths"].tolist(), strict=True))
    return {text[end - length : end].decode(): row for row, (end, length) in lengths if length >= 0}


def inconsistencies(saved: Saved, state: State) -> list[str]:
    """What does not fit together in a checkpoint; nothing where all is well."""
    assert saved.header
    learner, counts = state["learner"], Counter(state["ingest"]["counts"])
    read = counts.total()
    checks = {
        "every record ends in one count": read == state["ingest"]["records"] == saved.header.records,
        "the header has the same counts": counts == Counter(saved.header.counts),
        "the learner has taken what was counted": learner["events"] == counts["learned"] + counts["observed"],
        "positions are those of the records": sum(at for _, _, at in saved.header.positions) == read,
    }
    wrong = [what for what, holds in checks.items() if not holds]
    return [*wrong, *_tables(learner), *_references(learner, state["outbox"]), *_not_finite(state)]


def _tables(learner: State) -> Iterator[str]:
    """Tables that have not the same rows as their ids."""
    users, items = (len(learner[kind]["lengths"]) for kind in ("users", "items"))
    family = learner["family"]
    sizes = {
        "users": users,
        "users' last use": len(learner["users"]["last_used"]),
        **{f"log {part}": len(learner["log"][part]) for part in ("start", "size", "count")},
        **{f"user table {name}": len(table["weight"]) for name, table in family["users"].items()},
        **{f"user optimizer {name}": len(table["squares"]) for name, table in family["users"].items()},
    }
    yield from (f"{what} has {size} rows, not {users}" for what, size in sizes.items() if size != users)
    sizes = {
        "items' last use": len(learner["items"]["last_used"]),
        "first seen": len(learner["first_seen"]),
        "features": len(learner["features"]["hashes"]),
        "popularity": len(learner["popularity"]["weight"]),
        "clicks": len(learner["sampler"]["clicks"]),
        **{f"item table {name}": len(table["weight"]) for name, table in family["items"].items()},
        **{f"item optimizer {name}": len(table["squares"]) for name, table in family["items"].items()},
    }
    yield from (f"{what} has {size} rows, not {items}" for what, size in sizes.items() if size != items)


def _references(learner: State, outbox: State) -> Iterator[str]:
    """Rows that are named somewhere although they are nobody's, and last uses that lie in the future."""
    live = {kind: torch.zeros(len(learner[kind]["lengths"]), dtype=torch.bool) for kind in ("users", "items")}
    for kind, flags in live.items():
        table = learner[kind]
        flags[list(ids_of(table).values())] = True
        if not torch.equal(flags, table["last_used"] != 0):
            yield f"{kind} with a row and without a last use, or the other way round"
        if sorted(table["free"].tolist()) != [row for row in range(1, len(flags)) if not flags[row]]:
            yield f"free rows of {kind} are not those without an id"
        if int(table["last_used"].max()) > learner["events"]:
            yield f"{kind} used by an event that has not come"
        flags[0] = True  # nobody
        for part in ("pending", "replay"):
            if not flags[learner[part][kind].long()].all():
                yield f"{part} names {kind} that are gone"
    if not live["users"][outbox["users"].long()].all():
        yield "the outbox names users that are gone"
    if learner["log"]["count"][~live["users"]].any():
        yield "a row that is nobody's has a history"
    if len(learner["pending"]["sequence"]) and int(learner["pending"]["sequence"][-1]) != learner["events"]:
        yield "the mini-batch does not end with the last event"


def _not_finite(state: Any, where: str = "") -> Iterator[str]:
    if isinstance(state, dict):
        for name, part in state.items():
            yield from _not_finite(part, f"{where}/{name}")
    elif isinstance(state, list):
        for n, part in enumerate(state):
            yield from _not_finite(part, f"{where}/{n}")
    elif isinstance(state, torch.Tensor) and state.is_floating_point() and not torch.isfinite(state).all():
        yield f"{where} is not finite"
