"""`python -m worker evaluate`: its measures against the definitions, its rows against the worker's own figures."""

import json
import math
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from model.learner import SCORED_AT_ONCE
from model.metrics import K, Prequential
from replay.datasets.synthetic import Synthetic
from replay.lines import LineWriter
from replay.pacing import Unpaced
from replay.runner import replay
from replay.stream import Selection
from tests.offline import small_settings
from tests.streams import SMALL, differences
from worker.__main__ import main
from worker.evaluate.dataset import EvaluationError
from worker.evaluate.measures import FEW_CLICKS, Measures, windows
from worker.evaluate.nightly import NightlyLearner, batch_of, days, nightly_row, uplift
from worker.evaluate.peers.base import peer_row, ranked
from worker.evaluate.peers.catalogue import PEERS, made
from worker.evaluate.peers.item_knn import RecencyItemKnn
from worker.evaluate.peers.pairs import MATRIX_ITEMS, Lists, Matrix, pairs
from worker.evaluate.rows import worker_row
from worker.evaluate.stream import EventStream, Records, read_stream
from worker.evaluate.variants import Variant, variants
from worker.offline import offline_worker
from worker.settings import EventSettings, Settings

CLUSTERED = Synthetic(1500, n_users=100, n_items=120, n_clusters=4, zipf=0.0, present=1.0, seed=3)


def settings_of(**model: object) -> Settings:
    """A small model that forgets no click."""
    return small_settings(**({"seen_items": 1000} | model))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return written(CLUSTERED, tmp_path_factory.mktemp("records") / "records.jsonl")


@pytest.fixture(scope="module")
def stream(records: Records) -> EventStream:
    return read_stream(records, EventSettings())


def written(dataset: Synthetic, path: Path) -> Records:
    with path.open("wb") as file:
        replay(dataset, Selection(), Unpaced(), LineWriter(file), lambda _: None)
    return Records(path)


def nothing(_done: int) -> None:
    pass


# --- measures ---


def lists(stream: EventStream, rng: np.random.Generator) -> np.ndarray:
    """(N, 10) Items that had appeared before each event, some lists short."""
    top = np.full((len(stream), K), -1, np.int32)
    appeared = 0
    for n, item in enumerate(stream.items.tolist()):
        length = min(appeared, int(rng.integers(0, K + 1)))
        top[n, :length] = rng.choice(appeared, length, replace=False) if length else []
        appeared = max(appeared, item + 1)
    return top


def test_the_measures_are_those_of_the_definitions(stream: EventStream) -> None:
    rng = np.random.default_rng(0)
    ranks, top = rng.integers(-1, 20, len(stream)), lists(stream, rng)
    measures = Measures(stream)
    for part in np.array_split(np.arange(len(stream)), 7):  # however they are grouped
        measures.add(part, ranks[part], top[part])
    found = measures.report()

    hits = (ranks >= 0) & (ranks < K)
    assert found["events"] == len(stream)
    assert found["recall_at_10"] == pytest.approx(hits.mean())
    assert found["recall_at_10_last_half"] == pytest.approx(hits[len(stream) // 2 :].mean())
    assert found["mrr_at_10"] == pytest.approx(
        np.mean([1 / (r + 1) if h else 0 for r, h in zip(ranks, hits, strict=True)])
    )
    assert found["ndcg_at_10"] == pytest.approx(
        np.mean([1 / math.log2(r + 2) if h else 0 for r, h in zip(ranks, hits, strict=True)])
    )
    assert found["coverage"] == len(set(top[top >= 0].tolist())) / len(stream.item_ids)

    clicks: Counter[int] = Counter()
    before: dict[int, list[int]] = {}
    information, repeated, dissimilar, few = [], [], [], []
    for n, (user, item) in enumerate(zip(stream.users.tolist(), stream.items.tolist(), strict=True)):
        shown = [i for i in top[n].tolist() if i >= 0]
        information += [-math.log2(clicks[i] / n) for i in shown]
        if before.get(user) and shown:
            repeated.append(len(set(shown) & set(before[user])) / len(shown))
        vectors = stream.item_vectors[shown]
        dissimilar += (
            [1 - np.mean([vectors[a] @ vectors[b] for a in range(len(shown)) for b in range(len(shown)) if a != b])]
            if len(shown) > 1
            else []
        )
        few += [hits[n]] if clicks[item] < FEW_CLICKS else []
        before[user] = shown
        clicks[item] += 1
    assert found["novelty_bits"] == pytest.approx(np.mean(information))
    assert found["repetition"] == pytest.approx(np.mean(repeated))
    assert found["diversity"] == pytest.approx(np.mean(dissimilar), rel=1e-4)
    assert (found["recall_at_10_few_clicks"], found["events_few_clicks"]) == (pytest.approx(np.mean(few)), len(few))


def test_windows_cover_the_stream_in_equal_parts() -> None:
    ranks = np.array([0] * 50 + [-1] * 50)
    found = windows(ranks)
    assert [part["until"] for part in found] == list(range(5, 101, 5))
    assert [part["recall_at_10"] for part in found] == [1.0] * 10 + [0.0] * 10


def test_item_vectors_tell_who_clicked_them(stream: EventStream) -> None:
    """The cosines of the projection are about those of the columns of clicks themselves."""
    clicks = np.zeros((len(stream.item_ids), len(stream.user_ids)))
    np.add.at(clicks, (stream.items, stream.users), 1)
    clicks /= np.linalg.norm(clicks, axis=1, keepdims=True)
    error = stream.item_vectors @ stream.item_vectors.T - clicks @ clicks.T
    assert np.abs(error).mean() < 0.1
    assert abs(error[~np.eye(len(error), dtype=bool)].mean()) < 0.05


# --- rows ---


def test_a_row_says_what_the_worker_itself_says(records: Records, stream: EventStream) -> None:
    settings = settings_of()
    worker = offline_worker(settings, records)
    worker.run(drain=True)
    worker.learner.learn()
    row = worker_row(Variant("small", settings), records, stream, nothing)
    own = worker.learner.metrics.report()
    for name in Prequential(1).curves["freshet"].mean():
        assert row[name] == own[name]
        assert row[f"{name}_last_half"] == own[f"{name}_last_half"]
    assert row["events"] == own["events_ranked"] == len(stream)
    baseline = peer_row(lambda of: made("popularity", of), stream, nothing)
    assert baseline["recall_at_10"] == pytest.approx(own["popularity_recall_at_10"], abs=1e-9)
    assert baseline["ndcg_at_10"] == pytest.approx(own["popularity_ndcg_at_10"], abs=1e-9)


def test_the_planted_clusters_are_found(records: Records, stream: EventStream) -> None:
    row = worker_row(Variant("small", settings_of(negatives=64)), records, stream, nothing)
    popular = peer_row(lambda of: made("popularity", of), stream, nothing)
    assert row["recall_at_10_last_half"] > 1.3 * popular["recall_at_10_last_half"]
    assert row["repetition"] < popular["repetition"]
    assert row["coverage"] > popular["coverage"]


def test_lists_name_the_right_items_when_rows_change_hands(records: Records, stream: EventStream) -> None:
    """With room for half of the items only, a hit is still in the list at its rank."""
    settings = settings_of(item_capacity=60)
    seen: list[tuple[int, int, list[int]]] = []

    class Recording(Measures):
        def add(self, numbers: np.ndarray, ranks: np.ndarray, top: np.ndarray) -> None:
            seen.extend(zip(numbers.tolist(), ranks.tolist(), top.tolist(), strict=True))
            super().add(numbers, ranks, top)

    from worker.evaluate.rows import Onlooker

    worker = offline_worker(settings, records)
    onlooker = Onlooker(stream, worker.learner, nothing)
    onlooker.measures = Recording(stream)
    worker.learner.listener = onlooker
    worker.run(drain=True)
    hits = [(number, rank, top) for number, rank, top in seen if 0 <= rank < K]
    assert len(hits) > 50
    assert all(top[rank] == stream.items[number] for number, rank, top in hits)


# --- peers ---


def test_ranks_and_lists_of_peers_follow_the_protocol() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        scores = rng.integers(0, 4, 30).astype(float)  # few values: many ties
        clicked = rng.choice(30, 8, replace=False).astype(np.int32)
        item, top = int(rng.integers(0, 33)), np.zeros(K, np.int32)
        order = sorted(set(range(30)) - set(clicked.tolist()), key=lambda i: (-scores[i], i))
        found = ranked(scores.copy(), clicked, item, top)
        assert found == (order.index(item) if item in order else -1)
        assert top.tolist() == order[:K]


def test_a_peer_that_has_diverged_does_not_win() -> None:
    top = np.zeros(K, np.int32)
    scores = np.array([np.nan, 1.0, np.inf, 2.0, np.nan])
    assert ranked(scores.copy(), np.empty(0, np.int32), 0, top) == -1
    assert top.tolist() == [3, 1] + [-1] * 8
    assert ranked(scores.copy(), np.empty(0, np.int32), 1, top) == 1


def test_the_item_knn_with_recency_is_that_of_its_formula(stream: EventStream) -> None:
    head = stream.head(400)
    peer = RecencyItemKnn(len(head.item_ids))
    weight: dict[tuple[int, int], float] = defaultdict(float)
    clicks: Counter[int] = Counter()
    history: dict[int, list[int]] = defaultdict(list)
    for user, item in zip(head.users.tolist(), head.items.tolist(), strict=True):
        newest_first = history[user][::-1][:40]
        scores = np.zeros(len(head.item_ids))
        peer.score(user, np.array(history[user], np.int32), scores)
        wanted = [
            sum(0.8**k * (weight[y, j] + weight[j, y]) / (clicks[y] + 5) ** 0.7 for k, y in enumerate(newest_first))
            / (clicks[j] + 5) ** 0.3
            for j in range(len(head.item_ids))
        ]
        assert scores == pytest.approx(wanted, rel=1e-4, abs=1e-9)
        peer.learn(user, np.array(history[user], np.int32), item)
        for gap, y in enumerate(newest_first, 1):
            weight[y, item] += math.exp(-gap / 5) if y != item else 0.0
        clicks[item] += 1
        history[user].append(item)


def test_lists_of_pairs_hold_what_the_matrix_does() -> None:
    rng = np.random.default_rng(2)
    matrix, lists_of_pairs = Matrix(50), Lists(50)
    for _ in range(400):
        others, weights = rng.integers(0, 50, 7).astype(np.int32), rng.random(7)
        item = int(rng.integers(0, 50))
        for each in (matrix, lists_of_pairs):
            each.add(others, weights, item)
        a, b = np.zeros(50), np.zeros(50)
        matrix.weigh(others, weights, a)
        lists_of_pairs.weigh(others, weights, b)
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
    assert isinstance(pairs(MATRIX_ITEMS + 1), Lists)


@pytest.mark.parametrize("name", ["item_knn_recency", "implicit_als", "implicit_bm25"])
def test_peers_find_the_planted_clusters(stream: EventStream, name: str) -> None:
    row = peer_row(lambda of: made(name, of), stream, nothing)
    popular = peer_row(lambda of: made("popularity", of), stream, nothing)
    assert row["recall_at_10_last_half"] > 1.1 * popular["recall_at_10_last_half"]
    assert row["family"] == row["name"] == name


@pytest.mark.parametrize("name", sorted(PEERS))
def test_each_peer_says_the_same_twice(stream: EventStream, name: str) -> None:
    def row() -> dict[str, object]:
        found = peer_row(lambda of: made(name, of), stream.head(300), nothing)
        return {key: value for key, value in found.items() if "second" not in key and key != "events_per_s"}

    first = row()
    assert row() == first
    assert first["events"] == 300
    json.dumps(first)


# --- nightly ---


@pytest.mark.parametrize("fresh", [True, False])
def test_with_a_night_after_each_mini_batch_nightly_is_online(stream: EventStream, fresh: bool) -> None:
    """The same state to the bit, and the same ranks if histories are up to date and counts move as seldom."""
    settings = settings_of(batch_size=SCORED_AT_ONCE)
    online = offline_worker(settings, []).learner
    nightly = NightlyLearner(settings.model, online.device, fresh=fresh)
    for first in range(0, 480, SCORED_AT_ONCE):
        part = batch_of(stream, first, first + SCORED_AT_ONCE)
        online.observe(part)
        nightly.observe(part)
        nightly.sleep()
    odd = differences(online.state(), nightly.state())
    assert {path.split("/")[1:3][-1] for path in odd} == (set() if fresh else {"freshet"})
    assert all(path.startswith("/metrics/") for path in odd)


def test_being_online_is_worth_most_when_tastes_drift_and_histories_wait_for_the_night(tmp_path: Path) -> None:
    """Tastes change at a known event in the midst of a day. The frozen model finds that out a night later."""
    drifting = Synthetic(
        3000, n_users=40, n_items=400, n_clusters=8, present=1.0, drift_at=1500, interval_s=864.0, seed=1
    )  # 100 events a day
    records = written(drifting, tmp_path / "records.jsonl")
    stream = read_stream(records, EventSettings())
    variant = Variant("small", settings_of(negatives=64))
    online = worker_row(variant, records, stream, nothing)
    frozen = nightly_row(variant, stream, nothing, fresh=False)
    fresh = nightly_row(variant, stream, nothing, fresh=True)
    assert online["events"] == frozen["events"] == fresh["events"] == 3000
    assert online["recall_at_10"] > fresh["recall_at_10"] > frozen["recall_at_10"]
    gain = uplift(online, frozen)
    assert gain["recall_at_10"] == online["recall_at_10"] / frozen["recall_at_10"] - 1
    assert len(gain["over_time"]) == len(online["over_time"])


def test_days_are_those_of_the_events_in_utc(stream: EventStream) -> None:
    times = np.array([0, 86_399_999, 86_400_000, 86_400_001, 3 * 86_400_000], np.int64)
    head = stream.head(5)
    timed = EventStream(head.users, head.items, head.weights, head.observe, times, head.user_ids, head.item_ids)
    assert days(timed).tolist() == [0, 2, 4, 5]
    with pytest.raises(EvaluationError, match="more than a day"):
        days(stream.head(100))


# --- the command line ---


def evaluate(*words: str) -> int:
    return main(["evaluate", *words])


FIELDS = {
    "dataset": str, "family": str, "recall_at_10": float, "recall_at_10_last_half": float, "ndcg_at_10": float,
    "mrr_at_10": float, "events": int, "events_per_s": float, "seed": int, "settings": dict, "default": bool,
    "coverage": float, "novelty_bits": float, "repetition": float, "diversity": float,
    "recall_at_10_few_clicks": float, "over_time": list, "command": str, "name": str, "kind": str,
}  # fmt: skip


def test_rows_of_families_variants_seeds_and_peers_stand_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "reports" / "evaluate.json"
    small = [f"--set={name}={value}" for name, value in SMALL.items()]
    where = ["synthetic:events=400,users=30,items=60", "--limit", "300", "--out", str(out)]
    code = evaluate(*where, *small, "--family", "two_tower,mf", "--variant", "once:replay=0", "--seeds", "0,7")
    assert code == 0
    found = json.loads(out.read_text())
    rows = found["rows"]
    assert [(row["name"], row["seed"]) for row in rows] == [
        *((name, seed) for name in ("two_tower", "mf", "once") for seed in (0, 7)), ("popularity", 0)
    ]  # fmt: skip
    for row in rows:
        assert {name: type(row[name]) for name in FIELDS} == FIELDS
        assert row["events"] == 300
        assert not row["default"]  # the settings are others
        assert row["selection"] == {"limit": "300"}
    once = next(row for row in rows if row["name"] == "once")["settings"]["model"]
    assert (once["replay"], once["family"], once["dim"]) == (0, "two_tower", SMALL["dim"])
    assert found["machine"]["cpu"]
    assert rows[0]["recall_at_10"] != rows[1]["recall_at_10"]  # another seed
    markdown = out.with_suffix(".md").read_text()
    assert all(row["name"] in markdown for row in rows)
    assert len(list(out.parent.glob("*.png"))) == 2
    assert "two_tower" in capsys.readouterr().out


def test_the_shipped_default_is_named_and_a_file_is_read_through_its_column_map(tmp_path: Path) -> None:
    file, out = tmp_path / "shop.csv", tmp_path / "e.json"
    lines = ["who,what,stars", *(f"u{n % 7},i{n % 5},{n % 5 + 1}" for n in range(60)), ",broken,1"]
    file.write_text("\n".join(lines) + "\n")
    columns = ["--columns", "user_id=who,item_id=what,value=stars", "--min-rating", "3", "--skip-bad-lines"]
    assert evaluate(str(file), *columns, "--out", str(out), "--no-plots") == 0
    default, popular = json.loads(out.read_text())["rows"]
    assert default["default"] is True
    assert popular["default"] is False
    assert default["events"] == popular["events"] == 36
    assert default["dataset"] == str(file)


@pytest.mark.parametrize(("words", "problem"), [
    ([], "name a data set"),
    (["nothing-of-the-kind"], "nothing-of-the-kind: neither the path of a file nor one of movielens-100k"),
    (["file"], "--path"),
    (["synthetic:events"], "'events' is no KEY=VALUE"),
    (["synthetic:size=9"], "unrecognized arguments: --size"),
    (["movielens-3k"], "invalid choice: '3k'"),
    (["FILE", "--columns", "user_id=whom,item_id=what"], "no column 'whom'; there are who, what"),
    (["FILE", "--columns", "user_id=who,item_id=what", "--limit", "0"], "--limit"),
    (["FILE", "--columns", "user_id=who,item_id=what", "--min-rating", "3"], "there is no event to evaluate"),
    (["synthetic", "--set", "model.replays=1"], "did you mean FRESHET_MODEL__REPLAY?"),
    (["synthetic", "--set", "modell.replay=1"], "no section 'modell'"),
    (["synthetic", "--set", "dim=wide"], "FRESHET_MODEL__DIM=wide"),
    (["synthetic", "--set", "dim"], "'dim' is no NAME=VALUE"),
    (["synthetic", "--variant", "dim=3"], "give NAME:SETTING=VALUE"),
    (["synthetic", "--family", "two_towers"], "no such family; there are two_tower"),
    (["synthetic", "--peer", "lightfm"], "no such peer; there are popularity"),
    (["synthetic", "--seeds", "one"], "whole numbers"),
    (["synthetic:events=50", "--nightly"], "more than a day"),
])  # fmt: skip
def test_what_cannot_be_is_said_in_one_line_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    file = tmp_path / "clicks.csv"
    file.write_text("who,what\nu,i\n")
    words = [str(file) if word == "FILE" else word for word in words]
    assert evaluate(*words, "--out", str(tmp_path / "e.json")) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if not line.startswith("reading")] == [said[-1]]
    assert problem in said[-1]
    assert said[-1].startswith("error: ")
    assert not (tmp_path / "e.json").exists()


def test_without_matplotlib_there_is_a_message_and_no_plot(tmp_path: Path) -> None:
    words = ["evaluate", "synthetic:events=60", "--out", str(tmp_path / "e.json")]
    code = f"import sys; sys.modules['matplotlib'] = None; from worker.__main__ import main; sys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'freshet[evaluate]'" in done.stderr
    assert not list(tmp_path.glob("*.png"))
    assert (tmp_path / "e.md").exists()


def test_a_variant_changes_its_own_settings_only() -> None:
    base = Settings()
    first, small = variants(base, [], [{"model.dim": "32"}], [("small", {"model.dim": "16", "runtime.device": "cpu"})])
    assert (first.settings.model.dim, small.settings.model.dim) == (32, 16)
    assert small.settings.runtime.device == "cpu"
    assert (first.default, Variant("x", base).default) == (False, True)
