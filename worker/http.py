"""/healthz, /readyz and /metrics: read-only, for probes and Prometheus, from a thread of its own."""

import io
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, SHUT_RDWR, SHUT_WR
from socketserver import TCPServer
from typing import Any, ClassVar

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from worker.settings import ENV_PREFIX, HttpSettings, SettingsError

_REQUEST_BYTES = 16 << 10  # of a request line and its headers
_LONGEST_LINE = 1 << 16
_REQUEST_S = 5.0  # for a client to send them
_CONNECTIONS = 16  # at once; one more ends the oldest, so that slow clients cannot keep a probe out

log = structlog.get_logger(__name__)


class Health:
    """What the loop says about itself. Thread-safe.

    Alive is a loop whose last turn is not older than `stale_after_s`; ready is alive without a reason
    that speaks against it.
    """

    def __init__(self, stale_after_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._stale_after_s, self._monotonic = stale_after_s, monotonic
        self._turned = monotonic()
        self._reasons: dict[str, str] = {"start": "the worker is starting"}
        self._lock = threading.Lock()

    def turn(self) -> None:
        """The loop has come round."""
        self._turned = self._monotonic()

    def set(self, reason: str, message: str | None) -> None:
        """Not ready because of `message`; None takes `reason` away. A new worker has the reason "start"."""
        with self._lock:
            if message is None:
                self._reasons.pop(reason, None)
            else:
                self._reasons[reason] = message

    @property
    def age_s(self) -> float:
        """Seconds since the last turn, or since the start before the first one."""
        return self._monotonic() - self._turned

    @property
    def alive(self) -> bool:
        return self.age_s < self._stale_after_s

    @property
    def reasons(self) -> dict[str, str]:
        """Everything that speaks against being ready."""
        with self._lock:
            reasons = dict(self._reasons)
        if not self.alive:
            reasons["loop"] = f"the loop has not turned for {self.age_s:.0f} s"
        return reasons


class HttpServer:
    """Answers from its own threads until closed. SettingsError when the address cannot be had."""

    def __init__(self, settings: HttpSettings, health: Health, registry: CollectorRegistry) -> None:
        handler = type("Handler", (_Handler,), {"health": health, "registry": registry})
        try:
            self._server = _Server((settings.host, settings.port), handler)
        except (OSError, UnicodeError) as error:
            raise SettingsError([_cannot_listen(settings, error)]) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True
        )
        self._thread.start()
        log.info("listening", host=settings.host, port=self.port)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop answering; the port is free afterwards."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def listen_problem(settings: HttpSettings) -> str | None:
    """Why the address cannot be had; None when it can, and it is free again afterwards."""
    try:
        _Server((settings.host, settings.port), _Handler).server_close()
    except (OSError, UnicodeError) as error:
        return _cannot_listen(settings, error)
    return None


def _cannot_listen(settings: HttpSettings, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    return (
        f"{ENV_PREFIX}HTTP__HOST, {ENV_PREFIX}HTTP__PORT: cannot listen on {settings.host}:{settings.port} "
        f"({reason}); another port, or 0 for a free one, is allowed"
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    allow_reuse_port = False  # two workers on one port must not share it unnoticed

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[Any, None] = {}  # sockets, the oldest first
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer asks the DNS for its own name here, which may take long and is of no use
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > _CONNECTIONS else None
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(SHUT_RDWR)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                del self._open[request]

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        log.debug("a client went away", client=str(client_address), error=repr(sys.exc_info()[1]))


class _Handler(BaseHTTPRequestHandler):
    health: ClassVar[Health]
    registry: ClassVar[CollectorRegistry]
    timeout = _REQUEST_S

    def version_string(self) -> str:
        return "freshet"

    def setup(self) -> None:
        super().setup()
        self.rfile = _Limited(self.rfile, _REQUEST_BYTES)

    def do_GET(self) -> None:
        routes = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        route = routes.get(self.path.partition("?")[0])
        if route is None:
            self._json(HTTPStatus.NOT_FOUND, {"error": "not found", "paths": sorted(routes)})
            return
        try:
            status, content_type, body = route()
        except Exception:
            log.exception("a request failed", path=self.path)
            self._json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "internal error; see the log"})
            return
        self._reply(status, content_type, body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def __getattr__(self, name: str) -> Any:
        # every other method there is, or will be
        if name.startswith("do_"):
            return self._not_allowed
        raise AttributeError(name)

    def _not_allowed(self) -> None:
        self._json(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "read-only"}, Allow="GET, HEAD")
        self._linger()

    def _linger(self) -> None:
        """Take in what the client still sends: closing now would reset the connection before the answer arrives."""
        with suppress(OSError):
            self.connection.shutdown(SHUT_WR)
            self.connection.settimeout(1)
            for _ in range(16):
                if not self.connection.recv(1 << 16):
                    return

    def _healthz(self) -> tuple[HTTPStatus, str, bytes]:
        alive, age_s = self.health.alive, round(self.health.age_s, 3)
        status = HTTPStatus.OK if alive else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "application/json", _encode({"alive": alive, "loop_age_s": age_s})

    def _readyz(self) -> tuple[HTTPStatus, str, bytes]:
        found = self.health.reasons
        reasons = [{"reason": name, "message": message} for name, message in sorted(found.items())]
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return status, "application/json", _encode({"ready": not reasons, "reasons": reasons})

    def _metrics(self) -> tuple[HTTPStatus, str, bytes]:
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        return HTTPStatus.OK, content_type, encode(self.registry)

    def _json(self, status: HTTPStatus, body: dict[str, Any], **headers: str) -> None:
        self._reply(status, "application/json", _encode(body), **headers)

    def _reply(self, status: HTTPStatus, content_type: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """What the standard library refuses by itself: a request that is malformed or too long."""
        self.close_connection = True
        # what could not be read may have no method, and counts as HTTP 0.9, which knows no status
        self.command, self.request_version = getattr(self, "command", None) or "GET", "HTTP/1.0"
        status = HTTPStatus(code)
        self._json(status, {"error": status.phrase})
        self._linger()

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http", client=self.address_string(), line=format % args)


class _Limited(io.BufferedIOBase):
    """A request line and headers that exceed the limit together look like one line that is too long."""

    def __init__(self, file: io.BufferedIOBase, limit: int) -> None:
        self._file, self._left = file, limit

    def readline(self, size: int | None = -1, /) -> bytes:
        wanted = _LONGEST_LINE if size is None or size < 0 else size
        line = self._file.readline(min(wanted, self._left))
        self._left -= len(line)
        # the standard library refuses a line of the size that it asked for
        return line if self._left else bytes(wanted)

    def close(self) -> None:
        self._file.close()
        super().close()


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode() + b"\n"
