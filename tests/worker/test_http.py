"""Health, readiness and metrics over real sockets."""

import http.client
import io
import json
import logging
import socket
from collections.abc import Iterator

import pytest
import structlog
from prometheus_client import CollectorRegistry, Counter

from tests.waiting import eventually
from worker.http import Health, HttpServer
from worker.settings import HttpSettings, LogSettings, SettingsError
from worker.telemetry import configure_logging


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(stale_after_s=10, monotonic=clock)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("clicks", "Clicks.", registry=registry).inc(3)
    return registry


@pytest.fixture
def server(health: Health, registry: CollectorRegistry) -> Iterator[HttpServer]:
    server = HttpServer(HttpSettings(port=0), health, registry)
    yield server
    server.close()


@pytest.fixture
def log_stream() -> Iterator[io.StringIO]:
    """What is logged; logging is put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging(LogSettings(format="json"), stream=stream)
    yield stream
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def ask(server: HttpServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def raw(server: HttpServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_alive_while_the_loop_turns(server: HttpServer, health: Health, clock: Clock) -> None:
    assert ask(server, "/healthz")[0] == 200  # the start counts as a turn
    clock.now += 9
    health.turn()
    clock.now += 9.5
    status, headers, body = ask(server, "/healthz")
    assert (status, json.loads(body)) == (200, {"alive": True, "loop_age_s": 9.5})
    assert headers["Content-Type"] == "application/json"
    clock.now += 0.5
    status, _, body = ask(server, "/healthz")
    assert (status, json.loads(body)) == (503, {"alive": False, "loop_age_s": 10})
    health.turn()
    assert ask(server, "/healthz")[0] == 200


def test_not_ready_says_why(server: HttpServer, health: Health, clock: Clock) -> None:
    status, _, body = ask(server, "/readyz")
    assert status == 503
    assert json.loads(body)["reasons"] == [{"reason": "start", "message": "the worker is starting"}]
    health.set("start", None)
    health.set("start", None)
    status, _, body = ask(server, "/readyz")
    assert (status, json.loads(body)) == (200, {"ready": True, "reasons": []})
    health.set("redis", "timeout: nobody answers")
    health.set("kafka", "the topic clicks is not there")
    clock.now += 11
    status, _, body = ask(server, "/readyz")
    assert status == 503
    assert [reason["reason"] for reason in json.loads(body)["reasons"]] == ["kafka", "loop", "redis"]
    assert ask(server, "/healthz")[0] == 503
    health.turn()
    assert ask(server, "/healthz")[0] == 200  # weather does not make it dead
    health.set("redis", None)
    health.set("kafka", None)
    assert ask(server, "/readyz")[0] == 200


def test_metrics_in_both_forms(server: HttpServer) -> None:
    status, headers, body = ask(server, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert b"clicks_total 3.0\n" in body
    status, headers, body = ask(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/nope"])
def test_head_is_get_without_the_body(server: HttpServer, path: str) -> None:
    get, head = ask(server, path), ask(server, path, "HEAD")
    assert head[0] == get[0]
    assert head[2] == b""
    assert head[1]["Content-Type"] == get[1]["Content-Type"]
    assert int(head[1]["Content-Length"]) > 0


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
@pytest.mark.parametrize("path", ["/healthz", "/nope"])
def test_nothing_can_be_changed(server: HttpServer, method: str, path: str) -> None:
    status, headers, body = ask(server, path, method)
    assert status == 405
    assert headers["Allow"] == "GET, HEAD"
    assert json.loads(body) == {"error": "read-only"}


@pytest.mark.parametrize("path", ["/", "/healthz/", "/../etc/passwd", "/metrics%20", "//healthz/x"])
def test_there_is_nothing_else(server: HttpServer, path: str) -> None:
    status, headers, body = ask(server, path)
    assert status == 404
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body)["error"] == "not found"


def test_a_body_is_not_read_and_its_sender_gets_the_answer(server: HttpServer) -> None:
    head = b"POST /healthz HTTP/1.1\r\nContent-Length: 200000\r\n\r\n"
    assert raw(server, head + b"x" * 200_000).startswith(b"HTTP/1.0 405 ")


def test_a_query_is_ignored(server: HttpServer) -> None:
    assert ask(server, "/healthz?probe=1")[0] == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /healthz HTTP/1.1\r\n" + b"A: " + b"x" * 20_000 + b"\r\n\r\n", b"431"),
        (b"GET /healthz HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n", b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 \n", b"400"),
        (b"GET  /healthz  HTTP/x.y\r\n\r\n", b"400"),
    ],
    ids=["path", "header", "many headers", "TLS", "nonsense"],
)
def test_what_is_too_long_or_no_request_is_refused(server: HttpServer, request_: bytes, status: bytes) -> None:
    answer = raw(server, request_)
    assert status in answer.partition(b"\r\n")[0]
    assert b"<" not in answer  # no HTML pages
    assert ask(server, "/healthz")[0] == 200


def test_a_header_with_its_values_does_not_say_what_runs_here(server: HttpServer) -> None:
    _, headers, _ = ask(server, "/healthz")
    assert headers["Server"] == "freshet"


def test_clients_that_never_finish_do_not_keep_a_probe_out(server: HttpServer) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(40)]
    for client in idle:
        client.sendall(b"GET /healthz HT")
    assert ask(server, "/healthz")[0] == 200
    for client in idle:
        client.close()


def test_a_metric_that_fails_is_an_error_and_not_the_end(health: Health, log_stream: io.StringIO) -> None:
    class Broken:
        def collect(self) -> Iterator[object]:
            raise RuntimeError("secret detail")

    registry = CollectorRegistry()
    registry.register(Broken())
    server = HttpServer(HttpSettings(port=0), health, registry)
    try:
        status, _, body = ask(server, "/metrics")
        assert status == 500
        assert b"secret detail" not in body
        assert "secret detail" in log_stream.getvalue()
        assert ask(server, "/healthz")[0] == 200
    finally:
        server.close()


def test_a_port_that_is_taken_is_one_clear_error(server: HttpServer, health: Health) -> None:
    settings = HttpSettings(port=server.port)
    with pytest.raises(SettingsError) as error:
        HttpServer(settings, health, CollectorRegistry())
    (problem,) = error.value.problems
    assert f"127.0.0.1:{server.port}" in problem
    assert "FRESHET_HTTP__PORT" in problem
    assert "in use" in problem


def test_a_host_that_does_not_exist_is_one_clear_error(health: Health) -> None:
    with pytest.raises(SettingsError, match=r"FRESHET_HTTP__HOST.* no-such-host\.invalid:1234"):
        HttpServer(HttpSettings(host="no-such-host.invalid", port=1234), health, CollectorRegistry())


def test_only_this_machine_is_answered_unless_told(server: HttpServer) -> None:
    assert HttpSettings().host == "127.0.0.1"
    assert server._server.server_address[0] == "127.0.0.1"


def test_the_port_is_free_after_close(health: Health, registry: CollectorRegistry) -> None:
    first = HttpServer(HttpSettings(port=0), health, registry)
    port = first.port
    assert ask(first, "/healthz")[0] == 200
    first.close()
    second = HttpServer(HttpSettings(port=port), health, registry)
    assert eventually(lambda: ask(second, "/healthz")[0] == 200)
    second.close()
