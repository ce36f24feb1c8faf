"""The model and its checkpoints under the faults that real ones have met; the worker is a process of its own."""

import copy
import ctypes
import json
import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from redis import Redis

from model.families import FAMILIES
from model.learner import OnlineLearner
from tests.clicks import MakeWorker, Send, clicks, published
from tests.consistency import ids_of, inconsistencies
from tests.faults.own_kafka import assert_learned
from tests.offline import ran, small_settings
from tests.streams import batch, clustered, differences, small_config
from tests.waiting import eventually
from tests.worker_process import WorkerProcess
from worker.checkpoint import FORMAT, Header, Saved, load
from worker.events import encode
from worker.state import WorkerState, check_compatible

pytestmark = pytest.mark.faults
integration = pytest.mark.integration
slow = pytest.mark.slow


def all_states(worker: WorkerProcess) -> list[tuple[Saved, dict]]:
    """Every checkpoint of a worker that is not running, newest first; each must be of one moment."""
    found = [load(saved.path) for saved in worker.checkpoints()]
    for saved, state in found:
        assert inconsistencies(saved, state) == [], saved.path.name
    return found


def records_saved(worker: WorkerProcess) -> int:
    saved = worker.checkpoints()
    assert saved
    assert saved[0].header
    return saved[0].header.records


# ---- M1: killed while it saves, or the newest file damaged


@integration
@slow
def test_a_worker_that_is_killed_inside_its_saves_goes_on_from_a_whole_one(make_worker: MakeWorker, send: Send) -> None:
    """M1: kill -9 while the file is being written, and just after it has its name; in the end the same bits."""
    values, *_ = clicks(6400, users=3000)
    settings = {"runtime__deterministic": "true", "model__dim": 256}
    killed = make_worker("killed", checkpoint__every_events=32, **settings)
    folder = Path(killed.settings["FRESHET_CHECKPOINT__DIR"])
    sent, unfinished = 0, 0
    for life in range(6):
        inside = life % 2 == 0
        killed.start().wait_read(sent)
        while not (writing(folder) if inside else saved_anew(folder, killed)):
            send(values[sent : sent + 64])  # and so it goes on saving
            sent += 64
        killed.kill()
        unfinished += bool(list(folder.glob("*.tmp")))
        all_states(killed)
    assert unfinished, "no kill came inside a save"
    send(values[sent:])
    assert killed.start("run", "--drain").wait() == 0
    whole = make_worker("whole", redis__prefix="other", **settings)
    assert whole.start("run", "--drain").wait() == 0
    (_, one), (_, other) = all_states(killed)[0], all_states(whole)[0]
    assert differences(one["learner"], other["learner"]) == []
    assert differences(one["ingest"], other["ingest"]) == []


def writing(folder: Path) -> bool:
    """Watches for a moment; True as soon as a save has begun to write."""
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        with suppress(FileNotFoundError):
            if any(file.stat().st_size for file in folder.glob("*.tmp")):
                return True
    return False


def saved_anew(folder: Path, worker: WorkerProcess) -> bool:
    """True as soon as this life of the worker has given a file its name."""
    until, before = time.monotonic() + 0.3, max(folder.glob("*.pt"), default=None)
    while time.monotonic() < until:
        if max(folder.glob("*.pt"), default=None) != before:
            return True
    return False


@integration
@slow
def test_of_damaged_checkpoints_the_one_before_is_used_and_when_all_are_nothing_starts_by_itself(
    make_worker: MakeWorker, send: Send
) -> None:
    """M1: a flipped byte and a cut; the older positions are read on from. Starting afresh must be said."""
    values, *_ = clicks(960)
    settings = {"runtime__deterministic": "true", "checkpoint__every_s": 3600}
    worker = make_worker(**settings)
    for part in (values[:640], values[640:]):
        send(part)
        assert worker.start("run", "--drain").wait() == 0
    newest = worker.checkpoints()[0]
    assert [saved.header and saved.header.records for saved in worker.checkpoints()][:2] == [960, 640]
    sound = load(newest.path)[1]
    flip(newest.path)
    assert worker.start("run", "--drain").wait() == 0
    assert [line["path"] for line in worker.logged("checkpoint_damaged")] == [str(newest.path)]
    assert [line["records"] for line in worker.logged("resumed")] == [640]
    again = load(worker.checkpoints()[0].path)[1]
    assert differences(again["learner"], sound["learner"]) == []
    for n, saved in enumerate(worker.checkpoints()):
        os.truncate(saved.path, 1000 * n)
    assert worker.start().wait() == 2
    there = len(worker.checkpoints())
    assert f"error: none of the {there} checkpoints in {newest.path.parent} can be used" in worker.log
    assert "--fresh" in worker.log
    assert len(worker.checkpoints()) == there
    assert worker.start("run", "--fresh", "--drain").wait() == 0
    assert records_saved(worker) == 960


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# ---- M2: one moment


@pytest.mark.quick
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_learned_after_a_snapshot_does_not_reach_it(family: str) -> None:
    """M2: the file is written by another thread while ids are admitted, evicted and learned."""
    config = small_config(family=family, user_capacity=40, item_capacity=33)
    learner = OnlineLearner(config, torch.device("cpu"))
    learner.observe(clustered(300, users=120, items=100))
    snapshot = learner.state()
    as_it_was = copy.deepcopy(snapshot)
    learner.observe(clustered(300, seed=1, users=200, items=200))
    learner.forget("u1")
    assert differences(snapshot, as_it_was) == []
    assert differences(snapshot, learner.state()) != []


@integration
@slow
def test_checkpoints_that_are_written_while_ids_come_and_go_are_each_of_one_moment(
    make_worker: MakeWorker, send: Send
) -> None:
    """M2: saves run back to back in the background; most users and many items are new, and tables are full."""
    rng = np.random.default_rng(0)
    values: list[bytes | None] = [encode(f"u{n - rng.integers(0, 4)}", f"i{n // 3}") for n in range(4000)]
    send(values)
    worker = make_worker(
        checkpoint__every_events=20,
        checkpoint__keep=1000,
        kafka__max_poll_records=40,
        model__user_capacity=256,
        model__item_capacity=256,
    ).start()
    worker.wait_read(4000)
    assert worker.stop() == 0
    states = all_states(worker)
    assert len(states) >= 10
    assert records_saved(worker) == 4000
    read = [saved.header.records for saved, _ in states if saved.header]
    assert read == sorted(read, reverse=True)


# ---- M3: rows that are handed out again


@integration
@slow
def test_a_thousand_users_in_a_table_of_a_hundred_inherit_nothing(
    make_worker: MakeWorker, send: Send, redis_client: Redis
) -> None:
    """M3: each user clicks items of its own, so whatever a row kept of its former owner would show."""
    values: list[bytes | None] = [encode(f"u{n}", f"u{n}-{click}") for n in range(1000) for click in range(3)]
    send(values)
    worker = make_worker(model__user_capacity=128, model__item_capacity=4000, checkpoint__every_s=3600).start()
    worker.wait_read(3000)
    eventually(lambda: len(published(redis_client, "user")) <= 128, 60, worker.describe)
    assert worker.stop() == 0
    live = ids_of(all_states(worker)[0][1]["learner"]["users"])
    assert published(redis_client, "user") == dict.fromkeys(live, 3)
    assert "u999" in live
    for user in live:
        recent = json.loads(redis_client.hget(f"rec:user:{user}", "recent"))  # type: ignore[arg-type]
        assert recent == [f"{user}-2", f"{user}-1", f"{user}-0"]


# ---- M4: ids of any shape

IDS: list[str | int] = [
    "{}", "{a}b", " ", "  x ", "*", "?[a-z]*", "\n", "\r\n", "\t", "\x00", "a\x00b", "😀", "用户", "\u00e9", "e\u0301",
    "x" * 256,
    "😀" * 64, "a:b", ":", "meta", "rec:user:u", "rec:worker", "../../etc/passwd", "'; FLUSHALL; --", "%s %n", "\\",
    '"', "rec:popular",
    "null", "[1]", "true", "1.5", "0", "00", -1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**200, "\u202e", "\ufeffbom",
]  # fmt: skip
NOT_IDS = ["", "x" * 257, "é" * 129, 1.5, True, None, [], {}, 10**256]


@integration
@pytest.mark.quick
def test_ids_of_any_shape_come_back_from_redis_as_they_are(
    make_worker: MakeWorker, send: Send, redis_client: Redis
) -> None:
    """M4: from Kafka into the model, the checkpoint and Redis and out again; what is no id is rejected."""
    names = [str(one) for one in IDS]
    assert len(set(names)) == len(names)
    good = [json.dumps({"user_id": one, "item_id": one}, ensure_ascii=False).encode() for one in IDS]
    bad = [json.dumps({"user_id": "u", "item_id": "i"} | {field: one}).encode()
           for one in NOT_IDS for field in ("user_id", "item_id")]  # fmt: skip
    send([*bad, *good])
    worker = make_worker(kafka__dead_letter_suffix="").start().wait_ready()
    beat = worker.wait_read(len(good) + len(bad))
    assert (int(beat["events_learned"]), int(beat["events_rejected"])) == (len(good), len(bad))
    everything = dict.fromkeys(names, 1)
    assert_published_as(redis_client, everything)
    assert {name.decode() for name in redis_client.zrange("rec:popular", 0, -1)} == set(names)
    assert worker.stop() == 0
    state = all_states(worker)[0][1]["learner"]
    assert ids_of(state["users"]).keys() == ids_of(state["items"]).keys() == everything.keys()
    redis_client.flushall()  # what a new process publishes comes out of the checkpoint
    worker.start().wait_ready()
    assert_published_as(redis_client, everything)


def assert_published_as(client: Redis, everything: dict[str, int]) -> None:
    eventually(lambda: published(client, "user") == everything)
    eventually(lambda: published(client, "item") == everything)
    for name in everything:
        assert json.loads(client.hget(f"rec:user:{name}", "recent")) == [name]  # type: ignore[arg-type]


# ---- M5: nothing that is not finite


@pytest.mark.quick
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf, 1e38, 1e30])
def test_a_gradient_that_is_not_finite_or_whose_square_is_not_changes_nothing(family: str, weight: float) -> None:
    """M5: the optimizer keeps squares: 1e30 is finite, and would make its row deaf for ever."""
    learner = OnlineLearner(small_config(family=family, replay=0), torch.device("cpu"))
    learner.observe(clustered(160))
    rows = learner.users.rows, learner.items.rows
    before = learner.family.state(*rows)
    events = clustered(16, seed=1)
    learner.observe(batch(events.users, events.items, weights=[weight] * 16))
    assert float(learner.figures.skipped) == 1
    assert learned_differences(before, learner.family.state(*rows)) == []
    learner.observe(clustered(64, seed=2))
    assert float(learner.figures.skipped) == 1
    assert learned_differences(before, learner.family.state(*rows)) != []


def learned_differences(before: dict, after: dict) -> list[str]:
    """Without the graph of a family that has one: it is of the clicks, which have happened, and holds rows alone."""
    return [where for where in differences(before, after) if not where.startswith("/graph/")]


@integration
def test_hostile_numbers_reach_neither_a_checkpoint_nor_redis(
    make_worker: MakeWorker, send: Send, redis_client: Redis
) -> None:
    """M5: values that are no numbers, and the wildest settings that are allowed."""
    texts = ["NaN", "Infinity", "-Infinity", "1e308", "1e999", "-1e39", '"3"', "[]"]
    hostile = [f'{{"user_id": "u1", "item_id": "i1", "value": {text}}}'.encode() for text in texts]
    types = {"click": {}, "buy": {"weight": 100}, "skip": {"weight": -100}}
    events, kinds = clustered(2000), list(types)
    values = [
        encode(u, i, event_type=kinds[n % 3], value=3.4e38)
        for n, (u, i) in enumerate(zip(events.users, events.items, strict=True))
    ]
    send([value for n, good in enumerate(values) for value in (good, *hostile[: n % 100 == 0 and len(hostile)])])
    worker = make_worker(
        events__types=json.dumps(types),
        kafka__dead_letter_suffix="",
        model__learning_rate=10,
        model__dense_learning_rate=1,
        model__init_std=10,
    ).start()
    beat = worker.wait_read(2000 + 20 * len(hostile))
    assert int(beat["rejected_bad_value"]) == 20 * len(hostile)
    assert worker.stop() == 0
    all_states(worker)
    keys = [*redis_client.scan_iter("rec:user:*"), *redis_client.scan_iter("rec:item:*")]
    assert len(keys) == len(set(events.users)) + len(set(events.items))
    for key in keys:
        assert np.isfinite(np.frombuffer(redis_client.hget(key, "vector"), "<f4")).all()  # type: ignore[arg-type]


# ---- M6: who was not there before


@integration
def test_a_new_user_and_a_new_item_in_mid_stream_are_useful_at_once(
    make_worker: MakeWorker, send: Send, redis_client: Redis
) -> None:
    """M6: four clusters of 20 items; item n and user n belong to cluster n mod 4."""
    values, *_ = clicks(6400, users=200)
    send(values)
    worker = make_worker(runtime__max_wait_ms=50, publish__background_per_s=10_000).start().wait_ready()
    worker.wait_read(6400)
    send([encode("newcomer", "i41")])
    eventually(lambda: redis_client.exists("rec:user:newcomer"))
    items = {f"i{n}": vector(redis_client, f"rec:item:i{n}") for n in range(80)}
    mine = vector(redis_client, "rec:user:newcomer")
    best = sorted(items, key=lambda item: -float(mine @ items[item]))[:10]
    assert sum(int(item[1:]) % 4 == 1 for item in best) >= 8
    for n in range(5):  # rounds of clicks by users of cluster 2, and of nobody else
        send([encode(f"u{4 * user + 2}", "new item", event_id=f"{n}-{user}") for user in range(50)])

    def liked_by_its_own() -> bool:
        item = vector(redis_client, "rec:item:new item")
        liked = [np.mean([item @ vector(redis_client, f"rec:user:u{4 * n + cluster}") for n in range(20)])
                 for cluster in range(4)]  # fmt: skip
        return int(np.argmax(liked)) == 2

    eventually(lambda: redis_client.exists("rec:item:new item") and liked_by_its_own(), 60, worker.describe)


def vector(client: Redis, key: str) -> np.ndarray:
    return np.frombuffer(client.hget(key, "vector"), "<f4")  # type: ignore[arg-type]


# ---- M7: settings that do not fit

FIXED = {
    "family": ("mf", "two_tower"),
    "dim": (8, 16),
    "fusion": (False, True),
    "neighbours": (64, 1024),
    "seen_items": (900, 1000),
    "popularity_half_life": (5000, 10_000),
    "negative_power": (0.5, 0.75),
}


@integration
@slow
def test_every_setting_that_shaped_a_checkpoint_is_refused_with_both_values(
    make_worker: MakeWorker, send: Send
) -> None:
    """M7: all at once, then a capacity below what is held; nothing is loaded by half, nothing is written."""
    from worker import checkpoint

    assert set(FIXED) == set(checkpoint.SHAPING)
    send([encode(f"u{n}", f"i{n}") for n in range(200)])
    worker = make_worker()
    assert worker.start("run", "--drain").wait() == 0
    before = [(saved.path, saved.path.read_bytes()) for saved in worker.checkpoints()]
    settings = dict(worker.settings)
    worker.settings |= {f"FRESHET_MODEL__{name.upper()}": str(new) for name, (new, _) in FIXED.items()}
    assert worker.start().wait() == 2
    for name, (new, old) in FIXED.items():
        assert f"model.{name} is {new!r} in the settings, but {old!r} in the checkpoint" in worker.log
    worker.settings = settings | {"FRESHET_MODEL__USER_CAPACITY": "150", "FRESHET_MODEL__ITEM_CAPACITY": "199"}
    assert worker.start().wait() == 2
    for kind, capacity in (("user", 150), ("item", 199)):
        held = f"model.{kind}_capacity is {capacity} in the settings, but the checkpoint holds 200 {kind}s"
        assert held in worker.log
    assert [(saved.path, saved.path.read_bytes()) for saved in worker.checkpoints()] == before
    worker.settings = settings | {"FRESHET_MODEL__USER_CAPACITY": "200", "FRESHET_MODEL__ITEM_CAPACITY": "200"}
    send([encode("one more", "another")])  # what fits exactly goes on, and evicts
    assert worker.start("run", "--drain").wait() == 0
    assert records_saved(worker) == 201


def test_what_does_not_shape_a_model_may_change_between_runs() -> None:
    """M7: a mini-batch that was filling under another size, another window, another history, another seed."""
    values, *_ = clicks(700)
    changes: list[dict[str, dict[str, object]]] = [
        {"model": {}},
        {"model": {"batch_size": 16, "history": 3}, "evaluation": {"window": 10}},
        {"model": {"batch_size": 200, "replay_mean_age": 20, "seed": 7}, "events": {"dedup_window": 5}},
        {"model": {"batch_size": 7, "user_capacity": 100_000, "replay": 0, "negatives": 8}},
        {"model": {"history": 8, "replay_mean_age": 500}, "evaluation": {"share": 0.5}, "events": {"dedup_window": 0}},
    ]
    state: WorkerState | None = None
    for part, change in enumerate(changes, start=1):
        before, now = state, small_settings(**change["model"])
        sections = {name: type(getattr(now, name))(**values) for name, values in change.items() if name != "model"}
        if before is not None:
            saved, header = before.snapshot()
            check_compatible(Path("checkpoint"), saved, header, now.model)
        state = ran(now.model_copy(update=sections), values[: 140 * part], going_on_from=before)
        saved, header = state.snapshot()
        assert inconsistencies(Saved(Path("checkpoint"), 1, 0, header), saved) == []
        assert saved["learner"]["events"] == 140 * part


# ---- M8: no room, no folder, no right


def assert_goes_on_unsaved(
    worker: WorkerProcess, send: Send, client: Redis, values: list[bytes | None], sent: int, newest: Path
) -> None:
    """Saving fails; it says so, reads, learns and publishes, and what was saved stays as it is."""
    content = newest.read_bytes()
    failures = worker.metric("freshet_checkpoints_total", result="failed")
    send(values)
    worker.wait_read(sent + len(values))
    eventually(lambda: worker.metric("freshet_checkpoints_total", result="failed") > failures + 1, 60, worker.describe)
    eventually(lambda: "could not be written" in worker.reasons().get("checkpoint", ""), 60, worker.describe)
    assert worker.reasons().keys() == {"checkpoint"}
    assert (worker.get("/readyz")[0], worker.get("/healthz")[0]) == (503, 200)
    assert worker.logged("checkpoint_failed")
    eventually(lambda: sum(published(client, "user").values()) == sent + len(values), 60, worker.describe)
    there = newest if newest.exists() else newest.parent.with_name("elsewhere") / newest.name
    assert there.read_bytes() == content
    assert not list(newest.parent.glob("*.tmp"))


def assert_recovers(worker: WorkerProcess, records: int) -> None:
    """It saves again by itself, all that was read meanwhile."""
    eventually(lambda: worker.get("/readyz")[0] == 200, 60, worker.describe)
    eventually(lambda: records_saved(worker) == records, 60, worker.describe)
    assert worker.stop() == 0
    all_states(worker)


def running(make_worker: MakeWorker, send: Send, values: list[bytes | None]) -> tuple[WorkerProcess, Path]:
    """A worker that has saved `values`, and its newest checkpoint."""
    worker = make_worker(checkpoint__every_s=0.5, checkpoint__keep=100).start().wait_ready()
    send(values)
    worker.wait_read(len(values))
    eventually(lambda: records_saved(worker) == len(values), 60, worker.describe)
    return worker, worker.checkpoints()[0].path


@integration
@pytest.mark.parametrize("room", [pytest.param(0.0, marks=slow), 0.5, pytest.param(0.97, marks=slow)])
def test_a_full_disk_is_told_and_survived(
    make_worker: MakeWorker, send: Send, redis_client: Redis, room: float
) -> None:
    """M8: the kernel takes no more bytes in any file of the worker, its log's apart."""
    values, *_ = clicks(1500)
    worker, newest = running(make_worker, send, values[:1000])
    assert worker.process
    # More is appended to the log than fits into nothing; the checkpoint is larger by far.
    limit = max(int(room * newest.stat().st_size), worker.log_path.stat().st_size + 20_000)
    assert limit < newest.stat().st_size
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    assert_goes_on_unsaved(worker, send, redis_client, values[1000:], 1000, newest)
    assert "File too large" in worker.reasons()["checkpoint"]
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert_recovers(worker, 1500)


@integration
@slow
def test_a_folder_that_vanishes_is_told_and_used_again_when_it_is_back(
    make_worker: MakeWorker, send: Send, redis_client: Redis
) -> None:
    """M8: a volume that was unmounted; killed meanwhile, it would lose nothing but time."""
    values, *_ = clicks(1500)
    worker, newest = running(make_worker, send, values[:1000])
    folder, elsewhere = newest.parent, newest.parent.with_name("elsewhere")
    content = newest.read_bytes()
    folder.rename(elsewhere)
    failures = worker.metric("freshet_checkpoints_total", result="failed")
    send(values[1000:])
    worker.wait_read(1500)
    eventually(lambda: worker.metric("freshet_checkpoints_total", result="failed") > failures + 1, 60, worker.describe)
    assert "No such file or directory" in worker.reasons()["checkpoint"]
    eventually(lambda: sum(published(redis_client, "user").values()) == 1500, 60, worker.describe)
    assert not folder.exists(), "nothing is saved where the volume is missing"
    elsewhere.rename(folder)
    assert newest.read_bytes() == content
    assert_recovers(worker, 1500)


@integration
@slow
def test_a_folder_that_may_not_be_written_is_told_and_survived(
    make_worker: MakeWorker, send: Send, redis_client: Redis
) -> None:
    """M8: a volume that was remounted read-only."""
    values, *_ = clicks(1500)
    with ThreadPoolExecutor(1, initializer=obey_permissions) as thread:
        worker, newest = thread.submit(running, make_worker, send, values[:1000]).result()
    newest.parent.chmod(0o555)
    assert_goes_on_unsaved(worker, send, redis_client, values[1000:], 1000, newest)
    assert "Permission denied" in worker.reasons()["checkpoint"]
    newest.parent.chmod(0o755)
    assert_recovers(worker, 1500)
    newest.parent.chmod(0o555)
    newest.with_name("lock").chmod(0o444)
    with ThreadPoolExecutor(1, initializer=obey_permissions) as thread:
        thread.submit(worker.start).result()
    assert worker.wait() == 2
    assert f"error: the checkpoint folder {newest.parent} cannot be used: Permission denied" in worker.log


def obey_permissions() -> None:
    """What this thread starts obeys permissions, root or not: the right to override them is given up for good."""
    drop_from_bounding_set, override = 24, 1
    ctypes.CDLL(None, use_errno=True).prctl(drop_from_bounding_set, override, 0, 0, 0)


@integration
@slow
@pytest.mark.parametrize("when", ["while it runs", "at the stop"])
def test_a_disk_that_hangs_is_told_and_does_not_keep_a_worker_from_stopping(
    make_worker: MakeWorker, send: Send, redis_client: Redis, when: str
) -> None:
    """M8: a network volume whose server is gone. A pipe that nobody reads stands where the next save begins."""
    values, users, items = clicks(1500)
    settings: dict[str, object] = {"checkpoint__every_s": 0.5} if when == "while it runs" else {}
    worker = make_worker(runtime__grace_s=4, **settings).start().wait_ready()
    eventually(worker.checkpoints, 60, worker.describe)
    newest = worker.checkpoints()[0]
    pipe = newest.path.with_name(f"checkpoint-{newest.serial + 1:010d}.tmp")
    os.mkfifo(pipe)
    send(values[:1000])
    worker.wait_read(1000)
    if when == "while it runs":
        eventually(lambda: "the disk is slow, or hangs" in worker.reasons().get("checkpoint", ""), 90, worker.describe)
        assert worker.get("/healthz")[0] == 200
    eventually(lambda: sum(published(redis_client, "user").values()) == 1000, 60, worker.describe)
    assert worker.stop() == 0
    assert worker.logged("checkpoint_not_finished")
    assert worker.logged("checkpoint_given_up")
    assert worker.checkpoints()[0].path == newest.path
    send(values[1000:])
    worker.start().wait_read(1500)
    assert not pipe.exists()
    assert worker.stop() == 0
    assert_learned(worker, users, items)


# ---- another version's checkpoints


@integration
@slow
def test_checkpoints_of_another_format_are_refused_by_name_and_never_passed_over(
    make_worker: MakeWorker, send: Send
) -> None:
    """A worker of an older version that is started by mistake must not go on from what is older still."""
    values, *_ = clicks(200)
    send(values[:100])
    worker = make_worker()
    assert worker.start("run", "--drain").wait() == 0
    send(values[100:])
    ours, other = worker.checkpoints()[0].path, write_format(worker, FORMAT + 1)
    assert worker.start().wait() == 2
    assert f"error: {other}: format {FORMAT + 1}, but this version reads format {FORMAT}" in worker.log
    assert "--checkpoint" in worker.log
    assert worker.start("run", "--checkpoint", ours.name, "--drain").wait() == 0
    assert records_saved(worker) == 200


def write_format(worker: WorkerProcess, number: int) -> Path:
    """A sound checkpoint of another format, newer than all."""
    from worker.checkpoint import CheckpointFolder

    header = worker.checkpoints()[0].header
    assert header
    fields = {name: getattr(header, name) for name in Header.__slots__} | {"format": number}
    folder = CheckpointFolder(Path(worker.settings["FRESHET_CHECKPOINT__DIR"]), 100)
    return folder.save({"another": "world"}, Header(**fields)).path


@integration
@slow
def test_a_state_that_is_not_what_a_checkpoint_holds_is_one_clear_error(make_worker: MakeWorker, send: Send) -> None:
    """Sound checksums, and something else inside."""
    send(clicks(100)[0])
    worker = make_worker()
    assert worker.start("run", "--drain").wait() == 0
    other = write_format(worker, FORMAT)
    assert worker.start().wait() == 2
    assert f"error: {other} does not hold what this version goes on from" in worker.log
    assert "Traceback" not in worker.log


@integration
@slow
def test_frozen_inside_a_save_and_killed_it_starts_again(make_worker: MakeWorker, send: Send) -> None:
    """M1: SIGSTOP, as a paused virtual machine does, and then the machine is gone."""
    values, *_ = clicks(3000, users=2000)
    worker = make_worker(model__dim=256, checkpoint__every_events=50).start().wait_ready()
    folder = Path(worker.settings["FRESHET_CHECKPOINT__DIR"])
    send(values)
    eventually(lambda: any(file.stat().st_size for file in folder.glob("*.tmp")), 60, worker.describe)
    worker.signal(signal.SIGSTOP)
    worker.kill()
    assert worker.start("run", "--drain").wait() == 0
    assert all_states(worker)[0][1]["learner"]["events"] == 3000
