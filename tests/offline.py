"""The worker's own parts over records in memory, and checkpoints of them: no servers, no process."""

from collections.abc import Sequence

from model.config import ModelConfig
from tests.streams import SMALL
from worker.loop import Worker
from worker.offline import offline_worker
from worker.settings import RuntimeSettings, Settings
from worker.state import WorkerState

NOW_MS = 1_700_000_000_000


def small_settings(**model: object) -> Settings:
    """A model that learns in milliseconds, to the bit the same each time."""
    return Settings(
        model=ModelConfig(**(SMALL | model)),  # type: ignore[arg-type]
        runtime=RuntimeSettings(device="cpu", deterministic=True),
    )


def ran(settings: Settings, values: Sequence[bytes | None], going_on_from: WorkerState | None = None) -> WorkerState:
    """The state of a worker that has read `values`, from where another one had stopped if there is one."""
    worker = offline_worker(settings, [(value, NOW_MS) for value in values])
    state = state_of(worker)
    if going_on_from is not None:
        saved, header = going_on_from.snapshot()
        state.load(saved)
        worker.source.seek(header.positions_by_partition(), header.topic_ids)
    worker.run(drain=True)
    return state


def state_of(worker: Worker) -> WorkerState:
    """What saves it."""
    return WorkerState(worker.learner, worker.ingest, worker.outbox, worker.source, lambda: 1, "a model of the tests")
