"""Measures freshness from outside: from sending a click to seeing that its user's vector includes it."""

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

_LOOK_EVERY_S = 0.005  # the figures are late by up to this
_GIVE_UP_S = 30.0


class Probe:
    """Watches Redis for a sample of clicks, from a thread of its own."""

    def __init__(self, redis: Redis, prefix: str, clicks: Mapping[str, int], every: int = 50) -> None:
        """Every `every`th click is watched. `clicks`: how many each user has made before."""
        self._redis = redis
        self._prefix = prefix
        self._every = every
        self._clicks = Counter(clicks)
        self._sent = 0
        self._waiting: deque[tuple[float, str, int]] = deque()  # sent at, user, number of the user's click
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="probe", daemon=True)
        self.delays_s: list[float] = []
        self.missed = 0  # never seen

    def sent(self, user: str) -> None:
        """A click is handed to Kafka now."""
        self._clicks[user] += 1
        self._sent += 1
        if self._sent % self._every == 0:
            self._waiting.append((time.monotonic(), user, self._clicks[user]))

    def _watch(self) -> None:
        while self._waiting or not self._ended.wait(_LOOK_EVERY_S):
            with suppress(RedisError):  # looked at again, and seen late
                self._look()
            self._give_up()
            time.sleep(_LOOK_EVERY_S)

    def _look(self) -> None:
        waiting = list(self._waiting)
        with self._redis.pipeline(transaction=False) as pipeline:
            for _, user, _ in waiting:
                pipeline.hget(f"{self._prefix}:user:{user}", "events")
            answers = pipeline.execute() if waiting else []
        now = time.monotonic()
        for click, events in zip(waiting, answers, strict=True):
            if events is not None and int(events) >= click[2]:
                self.delays_s.append(now - click[0])
                self._waiting.remove(click)

    def _give_up(self) -> None:
        while self._waiting and time.monotonic() - self._waiting[0][0] > _GIVE_UP_S:
            self._waiting.popleft()
            self.missed += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if kind is not None:
            self._waiting.clear()
        self._thread.join()
