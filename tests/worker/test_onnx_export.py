"""`python -m worker export-onnx`: what another program computes is what the worker publishes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from model.learner import OnlineLearner
from tests.clicks import clicks
from tests.offline import ran, small_settings
from worker.__main__ import main
from worker.checkpoint import CheckpointFolder
from worker.config_view import ENV_FILE_VARIABLE


def saved(folder: Path, **model: object) -> OnlineLearner:
    """A checkpoint in `folder`, and the learner that it is of; items were evicted, so histories have holes."""
    values = clicks(400)[0]
    state = ran(small_settings(fusion=False, item_capacity=70, **model), values)
    CheckpointFolder(folder, 1).save(*state.snapshot())
    return state.learner


def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.delenv(ENV_FILE_VARIABLE, raising=False)
    monkeypatch.setenv("FRESHET_CHECKPOINT__DIR", str(tmp_path / "checkpoints"))
    return main(["export-onnx", "--out", str(tmp_path / "onnx")])


def run(path: Path, **inputs: Any) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    outputs: list[np.ndarray] = session.run(None, inputs)
    return outputs


@pytest.mark.parametrize("family", ["two_tower", "gnn", "attention", "mlp"])
def test_another_program_computes_and_ranks_as_the_worker(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    learner = saved(tmp_path / "checkpoints", family=family)
    assert exported(tmp_path, monkeypatch) == 0
    told = json.loads((tmp_path / "onnx" / "model.json").read_text("utf-8"))
    assert told["family"] == family
    assert told["item_ids"] == learner.items.ids
    assert told["components"] == [0, learner.family.dim]
    assert told["user_as_published"] is True

    users = learner.users.lookup([*(f"u{n}" for n in range(40)), "nobody"])
    rows = {external: row for row, external in enumerate(told["item_ids"]) if external}
    history = np.zeros((len(users), told["history"]), np.int64)
    for n, clicked in enumerate(learner.log.newest(users, told["history"])):
        known = [rows[item] for item in learner.item_ids(clicked)]  # as a reader has them from `recent`
        history[n, : len(known)] = known
    (vectors,) = run(tmp_path / "onnx" / "tower.onnx", history=history)
    np.testing.assert_allclose(vectors, learner.user_vectors(users), atol=1e-5)

    scores, top_scores, top = run(tmp_path / "onnx" / "ranking.onnx", user=vectors, seen=history, k=np.array([5]))
    products = learner.user_vectors(users) @ learner.item_vectors().T
    free = np.array([external is None for external in told["item_ids"]])
    assert free[0]
    products[:, free] = -np.inf
    np.put_along_axis(products, history, -np.inf, axis=1)
    np.testing.assert_allclose(scores, products, atol=1e-5)
    np.testing.assert_array_equal(np.take_along_axis(scores, top, axis=1), top_scores)
    np.testing.assert_allclose(top_scores, -np.sort(-products, axis=1)[:, :5], atol=1e-5)


def test_a_family_without_a_tower_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    saved(tmp_path / "checkpoints", family="mf")
    assert exported(tmp_path, monkeypatch) == 2
    assert "mf has no tower" in capsys.readouterr().err
    assert not (tmp_path / "onnx").exists()


def test_without_a_checkpoint_there_is_nothing_to_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(tmp_path, monkeypatch) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
