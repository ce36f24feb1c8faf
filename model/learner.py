"""The learner: owns all learned state.

Two paths. `observe` is the fast one: an event gets its rows and enters its user's history, and the user's vector
can be made anew at once. `learn` is the slow one, at the end of each mini-batch: score its events, count them,
take one optimizer step. An event waits for it as (user, position), which names the history before the event;
so each is scored with the history up to the event before it and with the weights of the last finished
mini-batch, however events were grouped.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.batch import Bool, EventBatch, Float32, Int32, Int64, PastEvents, TrainingBatch, joined
from model.config import ModelConfig
from model.families import FAMILIES
from model.features import ItemFeatures
from model.fusion import Fusion
from model.history import ClickLog
from model.id_table import IdTable
from model.kernels import compacted
from model.metrics import Prequential
from model.popularity import Popularity
from model.publishing import FITTED, Best, Fit, Readout, best_items, diverse
from model.ranking import RankListener, mask_seen, rank
from model.sampling import NegativeSampler, ReplayBuffer, block_seen, generator
from model.state import State

NEVER = np.iinfo(np.int64).max
_NEVER_MADE = (-1, -1, -1)
SCORED_AT_ONCE = 16  # events between two moves of the counts and weights of the fusion: fewer are better by a trifle
_SCORES_AT_ONCE = 4_000_000  # users times items that are scored together
_DIVERSE_OUT_OF = 5  # times as many of the best items are there to choose from
EVICTED_AT_ONCE = 0.01  # of the capacity: a full table is not searched for each new id


@dataclass(slots=True)
class Observed:
    """What `observe` changed, for whoever publishes it."""

    events: int = 0  # taken
    touched: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # user rows, as often as they clicked
    evicted_users: list[tuple[Int32, list[str]]] = field(default_factory=list)  # rows and whose they were
    evicted_items: list[tuple[Int32, list[str]]] = field(default_factory=list)


@dataclass(slots=True)
class StepFigures:
    """Sums over the steps since they were last taken. Tensors, so that no step waits for the device."""

    steps: int = 0
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    skipped: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    seconds: list[float] = field(default_factory=list)  # each mini-batch took, by the learner's clock
    out_of_memory: int = 0


class OnlineLearner:
    """Histories, tables, metrics and the filling mini-batch; test-then-train, one event after the other."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        *,
        ranked_share: float = 1.0,
        window: int = 10_000,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.config, self.device = config, device
        self.users, self.items = IdTable(config.user_capacity), IdTable(config.item_capacity)
        self.log = ClickLog(config.seen_items)
        self.family = FAMILIES[config.family](config, device)
        self.fusion = Fusion(config) if config.fusion else None
        self.readout = Readout(config, self.family, self.fusion)
        self.popularity = Popularity(config.popularity_half_life)
        self.sampler = NegativeSampler(config.negative_power)
        self.replay = ReplayBuffer(config.replay_mean_age)
        self.metrics = Prequential(window)
        self.features = ItemFeatures(config.item_features, self.family.item_width, device)
        self.first_seen = np.full(1024, NEVER, np.int64)  # by item row: number of the event it appeared with
        self.events = 0  # ever handed to `observe`
        self.steps = 0
        self.micro_batch_size = config.micro_batch_size or config.batch_size * (1 + config.replay)
        self.figures = StepFigures()
        self.listener: RankListener | None = None
        self._ranked_share, self._clock = ranked_share, clock
        self._items_moved = 0  # times that item rows were placed or reset
        self._published: tuple[tuple[int, int, int], torch.Tensor, Fit | None] | None = None
        self._fusion_as_of = _NEVER_MADE  # the event, steps and item rows that the item features were made for
        self._pending = _Pending(config.batch_size)

    @property
    def pending(self) -> int:
        """Events in the filling mini-batch."""
        return len(self._pending)

    # --- the fast path -------------------------------------------------------------------------------------

    def observe(self, events: EventBatch) -> list[Observed]:
        """Take `events` in order; learns whenever a mini-batch is full."""
        return list(self.observe_parts(events))

    def observe_parts(self, events: EventBatch) -> Iterator[Observed]:
        """The same in parts, each at most a mini-batch: what it fills is learned when the next part is asked for.

        So whoever publishes can do so before it waits for the optimizer. All parts must be asked for.
        """
        start, changes = 0, Observed()
        while start < len(events):
            part = events.part(start, start + min(self._pending.room, SCORED_AT_ONCE - self.pending % SCORED_AT_ONCE))
            fitting = min(_fitting(self.users, part.users), _fitting(self.items, part.items))
            if not fitting:
                self._evict(changes)
                continue
            self._observe(part.part(0, fitting), changes)
            start += fitting
            if self.pending % SCORED_AT_ONCE == 0:
                self._score(self._pending.newest(SCORED_AT_ONCE), self._filling_since)
            if self._pending.full:
                yield changes
                changes = Observed()
                self.learn()
        if changes.events:
            yield changes

    def _observe(self, events: EventBatch, changes: Observed) -> None:
        sequence = np.arange(self.events + 1, self.events + len(events) + 1)
        self.events += len(events)
        users, items = self.users.admit(events.users), self.items.admit(events.items)
        self._grow()
        self.users.touch(users, sequence)
        self.items.touch(items, sequence)
        np.minimum.at(self.first_seen, items, sequence)
        positions = self.log.append(users, items, events.observe)
        self._pending.add(PastEvents(users, items, positions, events.weights, sequence))
        changes.events += len(events)
        changes.touched = np.concatenate([changes.touched, users[events.observe]])

    def _grow(self) -> None:
        users, items = self.users.rows, self.items.rows
        self.log.grow(users)
        self.family.grow(users, items)
        self.popularity.grow(items)
        self.sampler.grow(items)
        self.features.grow(items)
        if self.fusion:
            self.fusion.grow(items)
        if items > len(self.first_seen):
            more = max(items, 2 * len(self.first_seen)) - len(self.first_seen)
            self.first_seen = np.concatenate([self.first_seen, np.full(more, NEVER)])

    def _evict(self, changes: Observed) -> None:
        """Make room where there is none. What is pending was used last, so it is never evicted."""
        for table, gone in ((self.users, changes.evicted_users), (self.items, changes.evicted_items)):
            if table.room == 0:
                count = max(1, int(table.capacity * EVICTED_AT_ONCE))
                rows = table.least_recently_used(count)
                gone.append((rows, table.evict(rows)))
                self._forget_users(rows) if table is self.users else self._forget_items(rows)

    def forget(self, user: str) -> Observed:
        """Erase everything that is known of a user; what others learned from its clicks stays."""
        changes = Observed()
        rows = self.users.lookup([user])
        if rows[0] > 0:
            changes.evicted_users.append((rows, self.users.evict(rows)))
            self._pending.forget_users(_flags(rows, self.users.rows))
            self._forget_users(rows)
        return changes

    def describe(self, items: list[str], hashes: Int32) -> None:
        """Distinct `items` (n,) are known by these features (n, PER_ITEM) from now on.

        Those that nobody has clicked yet get a row, too, while there is room without evicting any, and a vector from
        what clicked items with their features are like.
        """
        if not self.config.item_features:
            return
        new = [item for item in items if item not in self.items][: self.items.room]
        self.items.reserve(self.items.admit(new))
        self._grow()
        rows = self.items.lookup(items)
        self.features.describe(rows[rows > 0], hashes[rows > 0])
        self._place(rows[self.items.last_used[rows] < 0])

    def withdraw(self, items: list[str]) -> Observed:
        """What described `items` holds no longer; those that nobody has clicked lose their rows."""
        changes, rows = Observed(), self.items.lookup(items)
        self.features.forget(rows)
        unclicked = rows[self.items.last_used[rows] < 0]
        if len(unclicked):
            changes.evicted_items.append((unclicked, self.items.evict(unclicked)))
            self._forget_items(unclicked)
        return changes

    def _place(self, unclicked: Int32) -> None:
        self._items_moved += 1
        if len(unclicked) and self.features.learned:
            self.family.place_items(self._tensor(unclicked), self.features.told(unclicked))

    def _forget_users(self, rows: Int32) -> None:
        """Reset everything that refers to user `rows`, before they are handed out again."""
        self.log.forget_users(rows)
        self.replay.forget_users(_flags(rows, self.users.rows))
        self.family.reset_users(rows)

    def _forget_items(self, rows: Int32) -> None:
        """Reset everything that refers to item `rows`, before they are handed out again."""
        self._items_moved += 1
        self._fusion_as_of = _NEVER_MADE
        self.log.forget_items(rows, self.items.rows)
        self.replay.forget_items(_flags(rows, self.items.rows))
        self.popularity.forget(rows)
        self.sampler.forget(rows)
        self.features.forget(rows)
        self.first_seen[rows] = NEVER
        self.family.reset_items(rows)
        if self.fusion:
            self.fusion.forget(rows, self.items.rows)

    def user_vectors(self, rows: Int32) -> Float32:
        """Vectors (n, dim) of user rows, from their newest clicks."""
        return self.refreshed(rows)[0]

    def item_vectors(self) -> Float32:
        """Vectors (rows, dim) of all item rows; row 0 is nobody's."""
        return self._published_items()[0].cpu().numpy()

    def refreshed(
        self, rows: Int32, count: int = FITTED, without: Bool | None = None, diversity: float = 0.0
    ) -> tuple[Float32, Best]:
        """Vectors (n, dim) of user rows from their newest clicks, and their `count` best items by the full score.

        Left out of the best are what the user has clicked, rows that belong to no item, and the rows `without` (rows,).
        With `diversity` above 0 they are chosen out of several times as many, see `diverse`.
        """
        items, fit = self._published_items()
        nobody = self.items.last_used[: self.items.rows] == 0
        absent = torch.from_numpy(nobody if without is None else nobody | without)
        at_once = max(1, _SCORES_AT_ONCE // max(1, self.items.rows))
        vectors, best = [], []
        for start in range(0, len(rows), at_once):
            users = rows[start : start + at_once]
            history = self.log.newest(users, self.config.history)
            scores = self.readout.scores(self._tensor(users), history, self.items.rows)
            mask_seen(scores, self.log.before(users, self.log.count[users]))
            scores.masked_fill_(absent.to(scores.device), float("-inf"))
            found = best_items(scores, max(_DIVERSE_OUT_OF * count if diversity else count, FITTED))
            vectors.append(self.readout.users(self._tensor(users), history))
            if fit:
                fit.move(vectors[-1], found)
            best.append(diverse(found, items[:, : self.family.dim - 1], count, diversity) if diversity else found)
        none = np.empty((0, self.readout.dim), np.float32)
        return np.concatenate([none, *(part.cpu().numpy() for part in vectors)]), Best.joined(best, count)

    def _published_items(self) -> tuple[torch.Tensor, Fit | None]:
        """All items' vectors (rows, dim) and what fits users to them; made once for each state of the items."""
        self._refresh_fusion(self._filling_since)
        state = (self.steps, self.items.rows, self._items_moved)
        if self._published is None or self._published[0] != state:
            items = self.readout.items(self.items.rows)
            self._published = state, items, self.readout.fit(items) if self.fusion else None
        return self._published[1:]

    def rough_vectors(self, rows: Int32) -> Float32:
        """Vectors (n, dim) of user rows without the fit to their best items: many times as fast."""
        users = self.readout.users(self._tensor(rows), self.log.newest(rows, self.config.history))
        return users.cpu().numpy()

    def _refresh_fusion(self, now: int) -> None:
        """Make the item features anew, as of the next event to be learned, unless nothing has changed since."""
        rows = self.items.rows
        if self.fusion and self._fusion_as_of != (now, self.steps, rows):
            self.fusion.refresh(self.popularity.counts(rows, now), self.first_seen[:rows], now)
            self._fusion_as_of = (now, self.steps, rows)

    def user_ids(self, rows: Int32) -> list[str]:
        """Whose user rows these are."""
        return _named(self.users, rows)

    def item_ids(self, rows: Int32) -> list[str]:
        """Whose item rows these are."""
        return _named(self.items, rows)

    def users_live(self, rows: Int32) -> Bool:
        """True (n,) where a user row belongs to an id."""
        live: Bool = self.users.last_used[rows] > 0
        return live

    def items_live(self, rows: Int32) -> Bool:
        """True (n,) where an item row belongs to an id."""
        live: Bool = self.items.last_used[rows] != 0
        return live

    # --- the slow path -------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Score and learn the filling mini-batch, full or not. In this order:

        1. of events that did not come in time: rank them by the model and by popularity, let the fusion learn;
        2. count the events' items; 3. one optimizer step, replayed events beside; 4. tell the family of the events;
        5. let features of items follow; 6. keep the events for replay.
        """
        events = self._pending.take()
        if not len(events):
            return
        began = self._clock()
        if rest := len(events) % SCORED_AT_ONCE:  # the others were scored as they came
            self._score(events.part(slice(len(events) - rest, None)), int(events.sequence[0]))
        positive = events.weights > 0
        self.sampler.count(events.items[positive])
        self._step(events)
        self.family.observe(events.where(np.isfinite(events.weights)), self.log)
        self._learn_features(events.items[positive])
        # An event that cannot be learned must not come back with every replay.
        self.replay.add(events.where((events.weights != 0) & np.isfinite(events.weights)))
        self.figures.seconds.append(self._clock() - began)

    def _learn_features(self, clicked: Int32) -> None:
        """Let features follow the vectors of the items that were just learned, and unclicked items the features."""
        if not self.config.item_features:
            return
        rng = generator(self.config.seed, "features", self.steps)
        again = self.replay.draw(len(clicked), rng).items
        rows = self.features.known(np.unique(np.concatenate([clicked, again])))
        if len(rows):
            self.features.learn(rows, self.family.item_parameters(self._tensor(rows)))
        rows = self.features.next_rows(self.items.rows)
        self._place(rows[self.items.last_used[rows] < 0])

    def take_figures(self) -> StepFigures:
        """What the steps since the last call summed up to."""
        figures, self.figures = self.figures, StepFigures()
        return figures

    @property
    def _filling_since(self) -> int:
        """Number of the first event of the filling mini-batch."""
        return self.events - self.pending + 1

    def _score(self, events: PastEvents, since: int, *, rank: bool = True, count: bool = True) -> None:
        """Rank the events, let the fusion learn from them, count them. Either may be left out.

        Done as soon as so many are there, so that counts keep up; the family's weights are those of the last finished
        mini-batch. since: number of the first event of the mini-batch, for which the item features are made.
        """
        self._refresh_fusion(since)
        positive = events.weights > 0
        fusion = self.fusion if count else None
        ranked = positive & _chosen(events.sequence, self._ranked_share if rank else 0.0)
        taught = positive & _chosen(events.sequence, self.config.fusion_share if fusion else 0.0)
        self._rank(events, positive, ranked)
        if fusion:
            self._teach(fusion, events.where(taught))
            clicks = events.where(positive)
            fusion.count(clicks.items, self._history(clicks), clicks.sequence)
            popular = self.popularity.counts(self.items.rows, since)
            fusion.refresh(popular, self.first_seen[: self.items.rows], since, clicks.items)

    @torch.no_grad()
    def _candidate_scores(self, events: PastEvents, negatives: Int32) -> Float32:
        """The family's scores (n, 1 + K) of each event's own item and of `negatives` (K,)."""
        tables, history = self.family.tables(), self._tensor(self._history(events))
        users = self.family.represent(tables, self._tensor(events.users), history, history > 0)
        own = self.family.score_pairs(tables, users, self._tensor(events.items)).float()
        others = self.family.score(tables, users, self._tensor(negatives)).float()
        return torch.cat([own.unsqueeze(1), others], dim=1).cpu().numpy()

    def _rank(self, events: PastEvents, positive: Bool, ranked: Bool) -> None:
        """Note where the `ranked` events' items stand by the full score, and by popularity, which counts all."""
        first_seen, seen = self.first_seen[: self.items.rows], self.log.before(events.users, events.positions)
        popular = self.popularity.rank_and_add(events.items, positive, events.sequence, first_seen, seen, ranked)
        events = events.where(ranked)
        if not len(events):
            return
        history = self._history(events)
        scores = self.family.full_scores(self._tensor(events.users), self._tensor(history), self.items.rows)
        if self.fusion:
            scores = torch.from_numpy(self.fusion.scores(scores.cpu().numpy(), history))
        wanted = self.listener.top if self.listener else 0
        seen = self.log.before(events.users, events.positions)
        ranks, top = rank(scores, events, torch.from_numpy(first_seen).to(scores.device), seen, wanted)
        self.metrics.add(ranks, popular[ranked])
        if self.listener:
            self.listener.ranked(events, ranks, popular[ranked], top)

    def _history(self, events: PastEvents) -> Int32:
        return self.log.window(events.users, events.positions, self.config.history)

    def _teach(self, fusion: Fusion, events: PastEvents) -> None:
        """Move the fusion's weights by events, against the negatives of their mini-batch."""
        negatives = self.sampler.draw(self.config.negatives, generator(self.config.seed, "fusion", self.steps))
        known = (self.first_seen[events.items] < events.sequence) & (self.sampler.clicks[events.items] > 0)
        events = events.where(known)
        if not (len(events) and negatives.any()):
            return
        shape = (len(events), len(negatives))
        candidates = np.column_stack([events.items, np.broadcast_to(negatives, shape)])
        blocked = np.zeros(shape, np.bool_)
        block_seen(negatives, events.items, *self.log.before(events.users, events.positions), self.items.rows, blocked)
        blocked = np.column_stack([np.zeros(len(events), np.bool_), blocked | (negatives == 0)])
        log_q = self.sampler.log_expected(candidates, len(negatives))
        scores = self._candidate_scores(events, negatives)
        fusion.learn(candidates, log_q, blocked, scores, self._history(events))

    def _step(self, events: PastEvents) -> None:
        rng = generator(self.config.seed, "step", self.steps)
        batch = self._training_batch(events, rng)
        self.steps += 1
        while True:
            try:
                loss, finite = self.family.step(batch, self.micro_batch_size)
                break
            except torch.OutOfMemoryError:
                if self.micro_batch_size == 1:
                    raise
                self._shrink_micro_batch(len(batch))
        self.figures.steps += 1
        self.figures.loss = self.figures.loss.to(self.device) + torch.where(finite, loss, 0.0)
        self.figures.skipped = self.figures.skipped.to(self.device) + (~finite).float()

    def _shrink_micro_batch(self, samples: int) -> None:
        self.figures.out_of_memory += 1
        self.micro_batch_size = max(1, min(self.micro_batch_size, samples) // 2)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _training_batch(self, events: PastEvents, rng: np.random.Generator) -> TrainingBatch:
        """The events and, beside them, replayed ones; negatives shared by all."""
        old = self.replay.draw(self.config.replay * len(events), rng)
        both = joined([events, old])
        negatives = self.sampler.draw(self.config.negatives, rng)
        history = self.log.window(both.users, both.positions, self.config.history)
        blocked = np.zeros((len(both), len(negatives)), np.bool_)
        seen = self.log.before(both.users, self.log.count[both.users])
        block_seen(negatives, both.items, *seen, self.items.rows, blocked)
        blocked |= negatives == 0
        everything = np.concatenate([history.reshape(-1), both.items, negatives])
        item_rows, local = compacted(everything, self.items.rows)
        mentioned, near = len(item_rows), self.family.neighbours(item_rows)
        # The rows mentioned so far come first and are distinct, so they keep their numbers.
        item_rows, numbers = compacted(np.concatenate([item_rows, near.reshape(-1)]), self.items.rows)
        user_rows, users = compacted(both.users, self.users.rows)
        shape = (history.size, history.size + len(both))
        return TrainingBatch(
            user_rows=self._tensor(user_rows),
            item_rows=self._tensor(item_rows),
            users=self._tensor(users),
            history=self._tensor(local[: shape[0]].reshape(history.shape)),
            present=self._tensor(history > 0),
            positives=self._tensor(local[shape[0] : shape[1]]),
            positive_log_q=self._tensor(self.sampler.log_expected(both.items, len(negatives))),
            negatives=self._tensor(local[shape[1] :]),
            negative_log_q=self._tensor(self.sampler.log_expected(negatives, len(negatives))),
            blocked=self._tensor(blocked),
            weights=self._tensor(both.weights),
            neighbours=self._tensor(numbers[mentioned:].reshape(near.shape)),
        )

    # --- all of it, to be saved ----------------------------------------------------------------------------

    def state(self) -> State:
        """A copy of everything that shapes later output: tensors and plain data that `load` takes."""
        users, items = self.users.rows, self.items.rows
        pending = self._pending.columns()
        return {
            "users": self.users.state(),
            "items": self.items.state(),
            "log": self.log.state(users),
            "family": self.family.state(users, items),
            "fusion": self.fusion.state(items) if self.fusion else None,
            "popularity": self.popularity.state(items),
            "sampler": self.sampler.state(items),
            "replay": self.replay.state(),
            "metrics": self.metrics.state(),
            "features": self.features.state(items),
            "first_seen": torch.from_numpy(self.first_seen[:items].copy()),
            "pending": {n: torch.from_numpy(getattr(pending, n).copy()) for n in PastEvents.__slots__},
            "events": self.events,
            "steps": self.steps,
        }

    def load(self, state: State) -> None:
        """Become the learner whose `state` this is; the settings must be those it was made with."""
        self._published, self._fusion_as_of = None, _NEVER_MADE
        for name in ("users", "items", "log", "family", "popularity", "sampler", "replay", "metrics"):
            getattr(self, name).load(state[name])
        if self.fusion:
            self.fusion.load(state["fusion"])
        if "features" in state:  # not there before items were described
            self.features.load(state["features"])
        self.events, self.steps = state["events"], state["steps"]
        self.first_seen = state["first_seen"].numpy().copy()
        self._pending = _Pending(self.config.batch_size)
        self._pending.add(PastEvents(*(state["pending"][n].numpy().copy() for n in PastEvents.__slots__)))
        self._grow()
        if self._pending.full:  # saved under a larger batch_size
            self.learn()

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def warm_up(config: ModelConfig, device: torch.device) -> None:
    """Do everything once on a learner that is thrown away: what is compiled or set up at its first use is ready then.

    Without it the first events of a start would wait for it.
    """
    small = config.model_copy(update={"batch_size": 8, "user_capacity": 16, "item_capacity": 16})
    learner = OnlineLearner(small, device)
    ids = [str(n) for n in range(24)]  # more than fit: eviction is exercised, too
    learner.observe(EventBatch(ids, ids, np.ones(len(ids), np.bool_), np.ones(len(ids), np.float32)))
    learner.user_vectors(learner.users.lookup(ids[-1:]))
    learner.item_vectors()


def _named(table: IdTable, rows: Int32) -> list[str]:
    return [external for row in rows.tolist() if (external := table.ids[row]) is not None]


def _fitting(table: IdTable, ids: list[str]) -> int:
    """How many of `ids`, from the first on, the table has room for."""
    if table.room >= len(ids) or table.new_ids(ids) <= table.room:
        return len(ids)
    new: set[str] = set()
    room = table.room
    for n, external in enumerate(ids):
        if external not in table:
            new.add(external)
            if len(new) > room:
                return n
    return len(ids)


def _chosen(sequence: Int64, share: float) -> Bool:
    """A `share` of the events with these numbers (n,), spread evenly by the golden ratio, however they are grouped."""
    chosen: Bool = (sequence * 0.6180339887498949) % 1.0 < share
    return chosen


def _flags(rows: Int32, size: int) -> Bool:
    flags = np.zeros(size, np.bool_)
    flags[rows] = True
    return flags


class _Pending:
    """The filling mini-batch."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._parts: list[PastEvents] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def room(self) -> int:
        return self._size - self._count

    @property
    def full(self) -> bool:
        return self._count >= self._size

    def add(self, events: PastEvents) -> None:
        self._parts.append(events)
        self._count += len(events)

    def newest(self, count: int) -> PastEvents:
        """The last `count` events, in order."""
        parts = joined(self._parts)
        self._parts = [parts]
        return parts.part(slice(len(parts) - count, None))

    def forget_users(self, users: Bool) -> None:
        """Their events stay, as nobody's and without weight, so that the mini-batch ends where it would have."""
        events = self.columns()
        gone = users[events.users]
        self._parts = [
            PastEvents(
                np.where(gone, 0, events.users),
                np.where(gone, 0, events.items),
                np.where(gone, 0, events.positions),
                np.where(gone, np.float32(0), events.weights),
                events.sequence,
            )
        ]

    def take(self) -> PastEvents:
        """Everything, in order; empty afterwards."""
        events = self.columns()
        self._parts, self._count = [], 0
        return events

    def columns(self) -> PastEvents:
        """Everything, in order."""
        return joined(self._parts)
