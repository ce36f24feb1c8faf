"""`python -m worker evaluate --objective rating`: from a file of ratings to rows, and what it says when it cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from worker.evaluate.dataset import EvaluationError
from worker.evaluate.rating_data import encode, read_rating_data
from worker.evaluate.ratings import RatingPlan, summary

ROOT = Path(__file__).parents[2]


def evaluate(*words: object) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "worker", "evaluate", "--objective", "rating", *map(str, words)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FRESHET_")}
    return subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def csv_of_ratings(path: Path, count: int = 1500) -> Path:
    rng = np.random.default_rng(0)
    users, items = rng.normal(0, 0.7, 60), rng.normal(0, 0.7, 40)
    pairs = rng.permutation(60 * 40)[:count]
    lines = ["userId,movieId,rating,timestamp"]
    for n, (user, item) in enumerate(zip(*np.divmod(pairs, 40), strict=True)):
        rating = np.clip(np.round(3 + users[user] + items[item] + rng.normal(0, 0.3)), 1, 5)
        lines.append(f"{user},{item},{rating:.1f},{1_000_000_000 + n}")
    path.write_text("\n".join(lines) + "\n")
    return path


def lines(path: Path, *objects: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return path


def rating(user: object, item: object, value: float | None, **more: object) -> dict[str, object]:
    return {"user_id": str(user), "item_id": str(item), "value": value, **more}


def test_rows_hold_what_is_needed_to_make_them_again(tmp_path: Path) -> None:
    out = tmp_path / "reports" / "ratings.json"
    done = evaluate(csv_of_ratings(tmp_path / "r.csv"), "--model", "biases,mlp_side", "--seeds", "4,5", "--out", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["split"], row["seed"], row["model"]) for row in rows] == [
        ("random", 4, "biases"),
        ("random", 5, "biases"),
        *((f"random fold {n}", 4, "biases") for n in range(1, 6)),
    ]
    for row in rows:
        assert 0.2 < row["mae"] < row["rmse"] < 0.6
        assert row["rmse"] != row["rmse_without_refit"]
        assert row["epochs"] >= 1
        assert row["settings"] in [tried["settings"] for tried in row["tried"]]
        assert row["validation_rmse"] == min(tried["validation_rmse"] for tried in row["tried"])
        assert row["ratings"] == {"train": 1080, "validation": 120, "test": 300}
        assert row["dataset"].endswith("r.csv")
        assert "--seeds 4,5" in row["command"]
    assert "mlp_side is left out" in done.stderr
    assert "random 80/20, 2 seeds" in done.stdout
    assert "| biases only | random 80/20, 2 seeds |" in out.with_suffix(".md").read_text()


def test_the_same_command_gives_the_same_rows(tmp_path: Path) -> None:
    path, found = csv_of_ratings(tmp_path / "r.csv", 600), []
    for name in ("a.json", "b.json"):
        done = evaluate(path, "--model", "biases", "--split", "random", "--seeds", "0", "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads((tmp_path / name).read_text())["rows"]
        found.append({key: value for key, value in row.items() if key not in ("seconds", "command")})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--model", "svd"], "no model svd; there are: biases, mf, mlp, mlp_side, gnn, gnn_side"),
        (["--seeds", "one"], "--seeds one: whole numbers"),
        (["--seeds=-1"], "--seeds -1: numbers from 0 on"),
        ([], "have no rating (value)"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(tmp_path: Path, words: list[str], problem: str) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("user_id,item_id\n" + "".join(f"{n % 7},{n % 5}\n" for n in range(200)))
    done = evaluate(path, *words, "--out", tmp_path / "out.json")
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.json").exists()


def test_descriptions_become_columns_and_folds_indices(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "r.jsonl",
        {"describes": "user", "user_id": "0", "attributes": {"gender": "F", "age": 20}},
        {"describes": "user", "user_id": "1", "attributes": {"gender": "M", "age": 60}},
        {"describes": "item", "item_id": "0", "title": "x", "attributes": {"genres": ["Drama", "War"]}},
        {"describes": "fold", "name": "u1", "test": [1, 3]},
        *(rating(n % 2, n // 2, 1 + n % 5, event_id=f"e{n}", timestamp=n) for n in range(200)),
    )
    data = read_rating_data(path, "r")
    assert len(data.ratings) == 200
    assert data.repeated == 0
    assert data.folds["u1"].tolist() == [1, 3]
    assert data.side.users.shape[0] == 2
    assert data.side.items.tolist() == [[1.0, 1.0], *([[0.0, 0.0]] * 99)]


def test_a_pair_rated_again_counts_once_with_its_last_rating(tmp_path: Path) -> None:
    given = [rating(n % 20, n // 20, 1 + n % 5) for n in range(200)]
    path = lines(tmp_path / "r.jsonl", {"describes": "fold", "name": "u1", "test": [0, 200]}, *given, rating(0, 0, 4.5))
    data = read_rating_data(path, "r")
    assert (len(data.ratings), data.repeated) == (200, 1)
    assert data.ratings.values[-1] == 4.5
    assert ((data.ratings.users == 0) & (data.ratings.items == 0)).sum() == 1
    assert data.folds["u1"].tolist() == [199]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([rating(n, n, 3.0) for n in range(99)], "99 ratings are too few"),
        ([rating(n, n, 3.0) for n in range(200)], "all its ratings are 3"),
        ([rating(n, n, None if n == 5 else 3.0) for n in range(200)], "1 of its events have no rating"),
    ],
)
def test_what_cannot_be_learned_is_refused(tmp_path: Path, given: list[dict[str, object]], problem: str) -> None:
    with pytest.raises(EvaluationError, match=problem):
        read_rating_data(lines(tmp_path / "r.jsonl", *given), "r")


def test_attributes_are_encoded_without_a_look_at_ratings() -> None:
    columns = encode([{"year": 1990, "tags": ["a", "b"]}, {"year": 2000, "tags": "b"}, {"tags": []}, {}])
    assert columns.shape[0] == 4
    assert columns[2:].sum() == 0
    assert columns[:, :2].tolist() == [[1, 1], [0, 1], [0, 0], [0, 0]]  # tags a and b, by name before year
    assert (columns[:2, 2:].sum(1) == 1).all()  # each year falls into one bin
    assert (columns[0, 2:] != columns[1, 2:]).any()
    assert encode([{}, {}]).shape == (2, 0)


def test_a_plan_names_what_there_is() -> None:
    with pytest.raises(EvaluationError, match="no split temporal; there are: random, folds"):
        RatingPlan(splits=("temporal",))


def test_the_summary_averages_seeds_and_folds_apart() -> None:
    def row(split: str, error: float) -> dict[str, object]:
        numbers = {"rmse": error, "mae": error / 2, "rmse_without_refit": 1.0, "epochs": 3, "seconds": 1.0, "seed": 0}
        return {"dataset": "d", "model": "mf", "split": split} | numbers

    found = summary([row("random", 1.0), row("random", 0.8), row("u1", 0.7), row("u5", 0.5)])
    assert [(line[1], line[2], line[4]) for line in found] == [
        ("random 80/20, 2 seeds", "0.9000", "0.4500"),
        ("u1 to u5, averaged", "0.6000", "0.3000"),
    ]
