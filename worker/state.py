"""Everything that a checkpoint holds, gathered from the parts that own it, at one moment."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.learner import OnlineLearner
from worker.checkpoint import FORMAT, CheckpointError, Header, misfits, now_ms
from worker.ingest import Ingest
from worker.outbox import Outbox
from worker.source import Source

_CAPACITIES = {"user_capacity": "users", "item_capacity": "items"}


@dataclass(slots=True)
class WorkerState:
    """Copies the state of its parts for a checkpoint, and gives it back to them."""

    learner: OnlineLearner
    ingest: Ingest
    outbox: Outbox
    source: Source
    epoch: Callable[[], int]
    model_id: str  # of the model's whole life

    def snapshot(self) -> tuple[dict[str, Any], Header]:
        """A copy of everything, and its header."""
        state = {
            "model_id": self.model_id,
            "learner": self.learner.state(),
            "ingest": self.ingest.state(),
            "outbox": self.outbox.state(),
        }
        positions = self.source.positions()
        header = Header(
            format=FORMAT,
            created_ms=now_ms(),
            epoch=self.epoch(),
            records=self.ingest.records,
            positions=[(topic, partition, offset) for (topic, partition), offset in sorted(positions.items())],
            model=self.learner.config.model_dump(mode="json"),
            counts=dict(self.ingest.counts),
            topic_ids=self.source.topic_ids(),
        )
        return state, header

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a snapshot."""
        self.learner.load(state["learner"])
        self.ingest.load(state["ingest"])
        self.outbox.load(state["outbox"])


def check_compatible(path: Path, state: dict[str, Any], header: Header, now: ModelConfig) -> None:
    """CheckpointError that names both values where a checkpoint was made under settings that do not fit."""
    wanted = now.model_dump(mode="json")
    problems = misfits(header, wanted)
    for name, table in _CAPACITIES.items():
        held = int((state["learner"][table]["lengths"] >= 0).sum())
        if held > wanted[name]:
            problems.append(f"model.{name} is {wanted[name]} in the settings, but the checkpoint holds {held} {table}")
    if problems:
        advice = "set it back, or start afresh with --fresh"
        raise CheckpointError(f"{path} does not fit the settings: {'; '.join(problems)}; {advice}")
