"""`python -m worker export-onnx`: a checkpoint's user tower and ranking head, for programs in other languages.

tower.onnx makes a user's vector of its newest clicks, ranking.onnx ranks all items for such vectors, and model.json
says which item every row is and which model this was. All three are of one checkpoint.
"""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.families import FAMILIES
from model.id_table import IdTable
from model.recommender import Recommender
from worker.checkpoint import Saved, as_checkpoint_error, load
from worker.keys import LAYOUT

OPSET = 18
IR_VERSION = 10  # of the files: runtimes from 2024 on read it
TOWER, RANKING, MODEL = "tower.onnx", "ranking.onnx", "model.json"


class ExportError(Exception):
    """What keeps a checkpoint from being exported; the message says why, for people."""


def export(checkpoint: Path, out: Path) -> dict[str, Any]:
    """Write the three files of `checkpoint` into the folder `out`; returns what model.json says.

    Raises CheckpointError for one that cannot be read, ExportError for a family without a tower or for a missing
    library.
    """
    with _quiet():
        _require_libraries()
        saved, state = load(checkpoint)
        with as_checkpoint_error(checkpoint):
            family, items = _restored(saved, state)
        if not family.from_history:
            raise ExportError(f"the family {family.name} has no tower: its users are rows that it learned one by one")
        out.mkdir(parents=True, exist_ok=True)
        _write_tower(family, items.rows, out / TOWER)
        _write_ranking(family, items, out / RANKING)
    description = _description(saved, state, family, items)
    (out / MODEL).write_text(json.dumps(description, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return description


class Tower(nn.Module):
    """history (B, L) of item rows, newest first, 0 = none → the family's own part of published vectors (B, dim)."""

    def __init__(self, family: Recommender, item_rows: int) -> None:
        super().__init__()
        self.dense = family.dense
        self._family = family
        self._tables = {name: table[:item_rows].clone() for name, table in family.tables().items()}

    def forward(self, history: Tensor) -> Tensor:
        """See the class."""
        nobody = torch.zeros_like(history[:, 0])
        users = self._family.represent(self._tables, nobody, history, history > 0)
        return self._family.user_layout(users)


def _require_libraries() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ExportError(f"{error.name} is missing: pip install 'freshet[onnx]'") from error


def _restored(saved: Saved, state: dict[str, Any]) -> tuple[Recommender, IdTable]:
    assert saved.header is not None  # noqa: S101 # load() returns no other
    config = ModelConfig.model_validate(saved.header.model)
    learned = state["learner"]
    items = IdTable(config.item_capacity)
    items.load(learned["items"])
    family = FAMILIES[config.family](config, torch.device("cpu"))
    family.grow(len(learned["users"]["lengths"]), items.rows)
    family.load(learned["family"])
    return family, items


def _write_tower(family: Recommender, item_rows: int, path: Path) -> None:
    example = torch.zeros(2, family.config.history, dtype=torch.int64)
    batch = torch.export.Dim("batch", min=1)
    program = torch.onnx.export(
        Tower(family, item_rows).eval(),
        (example,),
        input_names=["history"],
        output_names=["user"],
        dynamic_shapes=({0: batch},),
        opset_version=OPSET,
        dynamo=True,
        verbose=False,
    )
    if program is None:
        raise ExportError(f"torch {torch.__version__} did not export the tower of {family.name}")
    program.save(str(path))


def _write_ranking(family: Recommender, items: IdTable, path: Path) -> None:
    """scores = user · items, −∞ for rows that are nobody's and for those `seen`; the `k` best of them."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    vectors = family.item_vectors(slice(0, items.rows)).numpy()  # (rows, dim)
    free = np.array([external is None for external in items.ids])
    constants = {
        "items": np.ascontiguousarray(vectors.T),
        "free": np.where(free, -np.inf, 0.0).astype(np.float32),
        "never": np.array([-np.inf], np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["user", "items"], ["products"]),
        helper.make_node("Add", ["products", "free"], ["candidates"]),
        helper.make_node("Shape", ["seen"], ["seen_shape"]),
        helper.make_node("Expand", ["never", "seen_shape"], ["nevers"]),
        helper.make_node("ScatterElements", ["candidates", "seen", "nevers"], ["scores"], axis=1),
        helper.make_node("TopK", ["scores", "k"], ["top_scores", "top_rows"], axis=1),
    ]
    columns: dict[str, tuple[int, list[str | int | None]]] = {
        "user": (TensorProto.FLOAT, ["batch", family.dim]),
        "seen": (TensorProto.INT64, ["batch", "seen"]),
        "k": (TensorProto.INT64, [1]),
        "scores": (TensorProto.FLOAT, ["batch", items.rows]),
        "top_scores": (TensorProto.FLOAT, ["batch", "k"]),
        "top_rows": (TensorProto.INT64, ["batch", "k"]),
    }
    named = {name: helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in columns.items()}
    graph = helper.make_graph(
        nodes,
        "ranking",
        [named[name] for name in ("user", "seen", "k")],
        [named[name] for name in ("scores", "top_scores", "top_rows")],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opset = helper.make_opsetid("", OPSET)
    made = helper.make_model(graph, producer_name="freshet", opset_imports=[opset], ir_version=IR_VERSION)
    onnx.checker.check_model(made)
    onnx.save(made, str(path))


def _description(saved: Saved, state: dict[str, Any], family: Recommender, items: IdTable) -> dict[str, Any]:
    assert saved.header is not None  # noqa: S101 # load() returns no other
    return {
        "layout": LAYOUT,
        "family": family.name,
        "exact": family.exact,  # the product of the two vectors is the family's score
        "model": state["model_id"],
        "epoch": saved.header.epoch,
        "version": state["outbox"]["version"],
        "checkpoint": saved.path.name,
        "created_ms": saved.header.created_ms,
        "opset": OPSET,
        "history": family.config.history,  # width of the tower's input
        "dim": family.dim,  # width of its output
        # Of a published vector these are the components from the first up to, not including, the second.
        "components": [0, family.dim],
        # A fusion weighs the family's part of a user's vector and moves it; the items' components are the same.
        "user_as_published": not family.config.fusion,
        "item_ids": items.ids,  # by row; null = nobody's row
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of its own workings at length; none of it is for whoever exports."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
