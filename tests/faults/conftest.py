"""A Redis of the test's own, to be broken, and the line to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from replay.local_stack import RedisServer, start_redis
from tests.proxy import TcpProxy


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that the test may kill, pause, fill and flush; it keeps nothing on disk."""
    with start_redis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def own_client(own_redis: RedisServer) -> Iterator[Redis]:
    """A client (bytes in and out) of `own_redis`, beside the proxy."""
    with Redis.from_url(own_redis.url) as client:
        yield client


@pytest.fixture
def line(own_redis: RedisServer) -> Iterator[TcpProxy]:
    """A line to `own_redis` that the test may cut, hold and black-hole."""
    with TcpProxy("127.0.0.1", own_redis.port) as proxy:
        yield proxy


@pytest.fixture
def line_url(line: TcpProxy) -> str:
    """The URL of `own_redis` over the line."""
    return f"redis://127.0.0.1:{line.port}/0"
