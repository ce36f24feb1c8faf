"""Redis over TLS and with narrow rights; nothing secret is ever shown."""

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from pydantic import SecretStr
from redis import Redis
from redis.exceptions import NoPermissionError

from replay.local_stack import RedisServer, free_port
from tests.certificates import Authority
from tests.clicks import MakeWorker, Send, clicks, published
from tests.faults.model_in_redis import EXACT, assert_redis_is_the_model
from tests.tls_front import TlsFront
from tests.waiting import eventually
from tests.worker_process import WorkerProcess
from worker.publisher import Heartbeat, ItemVectors, Meta, Popular, Publisher, Removed, UserVectors
from worker.settings import PublishSettings, RedisSettings
from worker.updates import Update

pytestmark = [pytest.mark.faults, pytest.mark.integration]

SECRET = "s3cret/w@rd:of%the=day"
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def learned(worker: WorkerProcess, count: int) -> None:
    eventually(lambda: worker.metric("freshet_events_total", outcome="learned") == count, 60, worker.describe)


def redis_problem(worker: WorkerProcess) -> str:
    """Wait until readiness says that Redis cannot be written; the message."""
    return eventually(lambda: _told(worker), 60, worker.describe)


def _told(worker: WorkerProcess) -> str | None:
    message = worker.reasons().get("redis", "")
    return message if ":" in message else None  # "not claimed yet" says nothing


# ---- TLS


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@pytest.fixture
def front(own_redis: RedisServer, authority: Authority) -> Iterator[TlsFront]:
    with TlsFront("127.0.0.1", own_redis.port, authority.issue("server")) as running:
        yield running


def test_vectors_travel_over_tls(
    make_worker: MakeWorker, send: Send, authority: Authority, front: TlsFront, own_client: Redis
) -> None:
    """rediss:// with an authority of one's own."""
    values, users, items = clicks(640)
    send(values)
    url = f"rediss://localhost:{front.port}/0"
    worker = make_worker(redis_url=url, redis__ssl_cafile=authority.cafile, **EXACT).start()
    eventually(lambda: worker.get("/readyz")[0] == 200, 60, worker.describe)
    assert_redis_is_the_model(worker, own_client, users, items)
    assert front.versions == {"TLSv1.3"}


@pytest.mark.parametrize("wrong", ["an authority that nobody knows", "a name that is not the server's"])
def test_a_server_that_cannot_prove_who_it_is_gets_nothing(
    make_worker: MakeWorker,
    send: Send,
    tmp_path: Path,
    authority: Authority,
    own_redis: RedisServer,
    own_client: Redis,
    wrong: str,
) -> None:
    """The worker learns on, says what is wrong, and hands over neither vectors nor a password."""
    send(clicks(640)[0])
    hosts = ("redis.example",) if "name" in wrong else ("localhost",)
    trusted = Authority(tmp_path / "others").cafile if "authority" in wrong else authority.cafile
    with TlsFront("127.0.0.1", own_redis.port, authority.issue("server", hosts)) as front:
        url = f"rediss://:{quote(SECRET, safe='')}@localhost:{front.port}/0"
        worker = make_worker(redis_url=url, redis__ssl_cafile=trusted, **EXACT).start()
        assert "certificate verify failed" in redis_problem(worker).lower()
        learned(worker, 640)
        assert worker.get("/healthz")[0] == 200
        assert front.versions == set()
        assert worker.stop() == 0
    assert own_client.dbsize() == 0


@pytest.mark.slow
def test_a_client_certificate_lets_the_worker_in(
    make_worker: MakeWorker, send: Send, authority: Authority, own_redis: RedisServer, own_client: Redis
) -> None:
    """Mutual TLS, by options of the URL."""
    values, users, items = clicks(640)
    send(values)
    mine = authority.issue("worker")
    with TlsFront("127.0.0.1", own_redis.port, authority.issue("server"), authority.cafile) as front:
        bare = f"rediss://localhost:{front.port}/0"
        stranger = make_worker("stranger", redis_url=bare, redis__ssl_cafile=authority.cafile, **EXACT).start()
        redis_problem(stranger)
        assert stranger.stop() == 0
        url = f"{bare}?ssl_certfile={mine.certificate}&ssl_keyfile={mine.key}"
        worker = make_worker("known", redis_url=url, redis__ssl_cafile=authority.cafile, **EXACT).start()
        eventually(lambda: worker.get("/readyz")[0] == 200, 60, worker.describe)
        assert_redis_is_the_model(worker, own_client, users, items)


# ---- rights


def documented(user: str) -> list[str]:
    """The rules that docs/operations.md gives this user, without its password."""
    line = re.search(rf"ACL SETUSER {user} on >password (.+)", OPERATIONS.read_text())
    assert line is not None
    return line.group(1).split()


def add_user(client: Redis, name: str, rules: list[str]) -> None:
    client.execute_command("ACL", "SETUSER", name, "reset", "on", ">pw", *rules)


def as_user(server: RedisServer, name: str) -> str:
    return server.url.replace("//", f"//{name}:pw@")


@pytest.mark.slow
def test_the_documented_rights_are_enough_for_a_worker(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """All that a worker does: publish, expire, evict, sweep what an older one wrote, take a lost claim back, check."""
    add_user(own_client, "freshet", documented("freshet"))
    own_client.set("somebody:else", "1")
    settings = EXACT | {"model__user_capacity": 128, "redis__ttl_s": 3600, "kafka__start": "latest"}
    url = as_user(own_redis, "freshet")
    older = make_worker("older", redis_url=url, **settings | {"kafka__start": "earliest"}).start()
    older.redis_url = own_redis.url  # for the test's own looks at it, whose client asks for more
    send(clicks(640, users=90)[0])
    older.wait_ready().wait_read(640)
    assert older.stop() == 0
    worker = make_worker("newer", redis_url=url, **settings).start().wait_ready()
    worker.redis_url = own_redis.url
    send(clicks(640, seed=1, users=200, prefix="new-")[0])
    worker.wait_read(640)
    eventually(lambda: worker.metric("freshet_evicted_total", table="users") > 0, 60, worker.describe)
    eventually(lambda: 0 < len(published(own_client, "user")) <= 128, 60, worker.describe)
    eventually(lambda: all(name.startswith("new-") for name in published(own_client, "user")), 60, worker.describe)
    own_client.unlink(*own_client.keys("rec:*"))
    eventually(lambda: worker.logged("claimed again; everything is to be published again"), 60, worker.describe)
    eventually(lambda: len(published(own_client, "user")) > 50, 60, worker.describe)
    eventually(lambda: worker.get("/readyz")[0] == 200, 60, worker.describe)
    assert worker.metric("freshet_publish_errors_total") == 0
    assert worker.stop() == 0
    checked = worker.command("check")
    assert "noperm" not in checked
    assert re.search(r"ok\W+redis", checked, re.IGNORECASE), checked
    assert own_client.acl_log() == []
    with Redis.from_url(url) as client, pytest.raises(NoPermissionError):
        client.get("somebody:else")


class Hand:
    """A publisher that is turned by hand and does all that a publisher does, until it is refused something."""

    def __init__(self, url: str, ttl_s: int) -> None:
        redis = RedisSettings(url=SecretStr(url), ttl_s=ttl_s, timeout_s=0.2)
        publish = PublishSettings(heartbeat_s=0.01)
        self.publisher = Publisher(redis, publish, Meta(2, "two_tower", True, "m", 1))
        self.refused: str | None = None
        self._until(lambda: self.publisher.epoch)
        one = np.ones((1, 2), np.float32), np.ones(1, np.int64)
        self._write(UserVectors(["u"], one[0], [b"[]"], one[1], 1, 1))
        self._write(ItemVectors(["i"], one[0], one[1], 2, 1))
        self._write(Popular(["i"], np.ones(1)))
        self._write(Heartbeat({"figure": 1, "gone": None}))
        self._write(Removed(["u"], [], 3))
        self.publisher.sweep()
        self._until(lambda: not self.publisher.sweeping)

    def come_back(self, admin: Redis) -> None:
        """After the claim was lost while this worker was away: it bids for it, for a while."""
        admin.delete("rec:meta", "rec:worker")
        until = _server_ms(admin) + 1000
        eventually(lambda: _server_ms(admin) > until, what="a worker that counts as away")
        self._until(self.publisher.take_loss)

    def _write(self, update: Update) -> None:
        if self.refused is None:
            self.publisher.submit(update)
            self._until(self.publisher.acknowledged)

    def _until(self, condition: Callable[[], object]) -> None:
        def turned() -> bool:
            self.publisher.turn()
            if (self.publisher.problem or "").startswith("noperm"):
                self.refused = self.publisher.problem
            return bool(condition()) or self.refused is not None

        if self.refused is None:
            eventually(turned, what=str(self.publisher.problem))


def _server_ms(client: Redis) -> float:
    seconds, micros = client.time()
    return 1000 * seconds + micros / 1000


def refused(url: str, admin: Redis) -> str | None:
    """What a worker with these rights is refused first; the second one takes over keys that expire."""
    admin.script_flush()
    expiring = Hand(url, 60)
    lasting = expiring if expiring.refused else Hand(url, 0)
    if lasting.refused is None:
        lasting.come_back(admin)
    return lasting.refused


NEEDED = [rule for rule in documented("freshet") if rule not in ("~rec:*", "+ping", "+info")]  # those are for `check`


@pytest.mark.parametrize("left_out", [None, *NEEDED])
def test_the_documented_rights_are_the_least(own_redis: RedisServer, own_client: Redis, left_out: str | None) -> None:
    """With all of them nothing is refused; without any one something is, and it is told as such."""
    add_user(own_client, "freshet", [rule for rule in documented("freshet") if rule != left_out])
    assert (refused(as_user(own_redis, "freshet"), own_client) is None) == (left_out is None)


def test_readers_can_read_and_nothing_else(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """The documented rights of a service that looks vectors up."""
    send(clicks(640)[0])
    worker = make_worker(redis_url=own_redis.url, **EXACT).start().wait_ready()
    worker.wait_read(640)
    eventually(lambda: own_client.exists("rec:user:u1", "rec:popular") == 2, 60, worker.describe)
    assert worker.stop() == 0
    add_user(own_client, "readers", documented("readers"))
    own_client.set("somebody:else", "1")
    with Redis.from_url(as_user(own_redis, "readers")) as client:
        assert client.hget("rec:meta", "dim") == b"83"
        assert client.hmget("rec:user:u1", "vector", "recent")[0]
        assert client.hgetall("rec:worker")[b"state"] == b"running"
        assert client.zrevrange("rec:popular", 0, 9)
        assert client.xrevrange("rec:stats", count=1)
        for forbidden in (
            lambda: client.hset("rec:user:u1", "events", 0),
            lambda: client.delete("rec:meta"),
            lambda: client.get("somebody:else"),
            client.flushall,
            lambda: client.eval("return 1", 0),
        ):
            with pytest.raises(NoPermissionError):
                forbidden()


# ---- secrets


def spellings(secret: str) -> list[str]:
    """Ways in which a secret may turn up; parts of it too, since it holds what separates the parts of a URL."""
    whole = [secret, quote(secret, safe=""), base64.b64encode(secret.encode()).decode()]
    return [*whole, "s3cret", "w@rd", "w%40rd", "of%the", "of%25the"]


def assert_shows_no_secret(*texts: str) -> None:
    for text in texts:
        found = [spelling for spelling in spellings(SECRET) if spelling in text]
        assert not found, f"{found} in {text[max(0, text.find(found[0]) - 200) :][:400]}"


@pytest.mark.slow
def test_a_wrong_password_is_nowhere_to_be_seen(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """T6: logs (also at debug), metrics, probes, `config`, `check`, Redis itself and the checkpoints are searched."""
    own_client.ping()
    own_client.execute_command("ACL", "SETUSER", "freshet", "on", ">another")
    own_client.config_set("requirepass", "a third")
    send(clicks(640)[0])
    password = quote(SECRET, safe="")
    logins = {
        "default": f":{password}@127.0.0.1:{own_redis.port}/0",
        "user": f"freshet:{password}@127.0.0.1:{own_redis.port}/0",
        "query": f"127.0.0.1:{own_redis.port}/0?username=freshet&password={password}",
        "away": f"freshet:{password}@127.0.0.1:{free_port()}/0",
        "nowhere": f"freshet:{password}@no-such-host.invalid:6379/0",
    }
    settings = EXACT | {"log__level": "debug"}
    for name, login in logins.items():
        worker = make_worker(name, redis_url=f"redis://{login}", **settings).start()
        redis_problem(worker)
        learned(worker, 640)
        pages = [worker.get(path)[1] for path in ("/metrics", "/readyz", "/healthz", "/nothing")]
        assert worker.stop() == 0
        assert_shows_no_secret(worker.log, *pages, worker.command("config"), worker.command("check"))
        saved = [path.read_bytes().decode("latin-1") for path in (worker.home / "checkpoints").iterdir()]
        assert_shows_no_secret(*saved)


@pytest.mark.slow
def test_the_right_password_is_nowhere_to_be_seen_either(
    make_worker: MakeWorker, send: Send, own_redis: RedisServer, own_client: Redis
) -> None:
    """T6: also when all goes well, also when Redis fails later, and in what the worker writes to Redis."""
    own_client.ping()
    own_client.config_set("requirepass", SECRET)
    send(clicks(640)[0])
    url = f"redis://:{quote(SECRET, safe='')}@127.0.0.1:{own_redis.port}/0"
    worker = make_worker(redis_url=url, log__level="debug", **EXACT).start().wait_ready()
    worker.wait_read(640)
    own_client.config_set("maxmemory", 1)
    redis_problem(worker)
    own_client.config_set("maxmemory", 0)
    eventually(lambda: worker.get("/readyz")[0] == 200, 60, worker.describe)
    stored = [own_client.dump(key).decode("latin-1") for key in own_client.scan_iter(count=1000)]
    pages = [worker.get(path)[1] for path in ("/metrics", "/readyz", "/healthz")]
    assert worker.stop() == 0
    assert_shows_no_secret(worker.log, *pages, *stored, worker.command("config"), worker.command("check"))


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@host:6379/0",  # not escaped
        f"http://:{quote(SECRET, safe='')}@host:99999",
        f"redis://:{quote(SECRET, safe='')}@host:6379/0?sokket_timeout=3",
        SECRET,
    ],
)
def test_a_wrong_url_is_refused_without_being_shown(make_worker: MakeWorker, url: str) -> None:
    """T6: one clear line that names the setting."""
    worker = make_worker(redis_url=url).start()
    assert worker.wait() == 2
    assert "FRESHET_REDIS__URL" in worker.log
    assert "Traceback" not in worker.log
    assert_shows_no_secret(worker.log, worker.command("check"), worker.command("config"))
