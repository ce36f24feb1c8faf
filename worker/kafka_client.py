"""Clients of kafka-python, opened and closed in bounded time."""

import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from kafka import KafkaConsumer
from kafka.errors import (
    KafkaConfigurationError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    RequestTimedOutError,
)
from kafka.net.compat import KafkaNetClient
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector

from worker.settings import KafkaSettings
from worker.source import SourceError

CLOSE_S = 2.0
_BOOTSTRAP_MS = 5000  # TLS and SASL take some round trips


def client_options(settings: KafkaSettings) -> dict[str, Any]:
    """What every client of kafka-python is given. Raises SourceError for settings that cannot work."""
    options: dict[str, Any] = {
        "bootstrap_servers": [server.strip() for server in settings.bootstrap_servers.split(",")],
        "client_id": "freshet",
        "request_timeout_ms": settings.request_timeout_ms,
        "metadata_max_age_ms": settings.metadata_max_age_ms,
        # A broker that was away is found again within a second.
        "reconnect_backoff_ms": 50,
        "reconnect_backoff_max_ms": 1000,
        "bootstrap_timeout_ms": _BOOTSTRAP_MS,
        "metrics_enabled": False,
        "security_protocol": settings.security_protocol,
    }
    if settings.security_protocol.endswith("SSL"):
        options["ssl_context"] = _ssl_context(settings)
    if settings.security_protocol.startswith("SASL"):
        if settings.sasl_mechanism == "GSSAPI" and find_spec("gssapi") is None:
            raise SourceError("kafka.sasl_mechanism GSSAPI needs the package gssapi")
        options["sasl_mechanism"] = settings.sasl_mechanism
        options["sasl_plain_username"] = settings.sasl_username or None
        options["sasl_plain_password"] = settings.sasl_password.get_secret_value() or None
    return options


def _ssl_context(settings: KafkaSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ssl_cafile or None)
        context.check_hostname = settings.ssl_check_hostname
    except (OSError, ssl.SSLError) as error:
        raise SourceError(f"kafka.ssl_cafile {settings.ssl_cafile!r}: {error}") from None
    try:
        if settings.ssl_certfile:
            password = settings.ssl_password.get_secret_value()
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile or None, password)
    except (OSError, ssl.SSLError) as error:
        raise SourceError(f"kafka.ssl_certfile {settings.ssl_certfile!r}: {error}") from None
    return context


def open_consumer(settings: KafkaSettings, **options: Any) -> tuple[Any, Any, Any]:
    """A KafkaConsumer without partitions, its ClusterMetadata, and the Future of metadata of the topics.

    Waits for the broker for some seconds at most, then raises one of kafka-python's errors. Raises SourceError for
    settings that cannot work.
    """
    fixed = {"enable_auto_commit": False, "auto_offset_reset": "none", "isolation_level": settings.isolation_level}
    # kafka-python does not hand this on to its metadata: asking for a topic would create it.
    metadata = {"allow_auto_create_topics": False}
    consumer, client = open_client(KafkaConsumer, metadata, **client_options(settings), **options, **fixed)
    try:
        return consumer, client.cluster, client.cluster.set_topics(settings.all_topics)
    except (ValueError, TypeError) as error:
        close_within(consumer.close, CLOSE_S)
        raise SourceError(f"kafka.topics: {error}") from None


def open_client(make: Callable[..., Any], metadata: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """A consumer or producer and its KafkaNetClient; `metadata` are settings of the latter's metadata.

    Raises one of kafka-python's errors, or SourceError for settings that cannot work.
    """
    opened: list[Any] = []

    def client(**config: Any) -> Any:
        net = NetworkSelector(**config)
        opened.append(KafkaNetClient(net, _Connections(net, **config)))
        opened[0].cluster.config.update(metadata)
        return opened[0]

    try:
        return make(**options, kafka_client=client), opened[0]
    except BaseException as error:
        # A client that could not connect leaves its thread and its connections behind.
        for half_open in opened:
            close_within(half_open.close, CLOSE_S)
        if isinstance(error, KafkaConfigurationError | ValueError | TypeError):
            raise SourceError(f"kafka: {error}") from None
        if isinstance(error, KafkaTimeoutError) and opened and opened[0]._manager.trouble is not None:
            raise _reason(opened[0]._manager.trouble, options["security_protocol"]) from None
        raise


def _reason(trouble: Exception, protocol: str) -> KafkaError:
    """Why a client could not connect, in words that help."""
    if protocol.startswith("SASL") and "socket disconnected" in str(trouble):
        return KafkaConnectionError(
            "the broker closed the connection during the authentication: wrong credentials or mechanism, perhaps"
        )
    return trouble if isinstance(trouble, KafkaError) else KafkaConnectionError(one_line(trouble))


class _Connections(KafkaConnectionManager):  # type: ignore[misc]
    """Remembers why the newest connection failed: a client that runs out of time does not say what it waited for."""

    trouble: Exception | None = None

    def get_connection(self, *args: Any, **options: Any) -> Any:
        """As without this class."""
        connection = super().get_connection(*args, **options)
        if not connection.init_future.is_done:
            connection.init_future.add_errback(self._failed)
        return connection

    def _failed(self, error: Exception) -> None:
        # A refusal may arrive as a mere disconnection at the next attempt, and the last one is cut short by the limit.
        if self.trouble is None or _says(error) >= _says(self.trouble):
            self.trouble = error


def _says(error: Exception) -> int:
    """How much an error says of what is wrong."""
    if isinstance(error, KafkaTimeoutError | RequestTimedOutError):
        return 0
    return 1 if isinstance(error, KafkaError) and error.retriable else 2


class Opening:
    """Opens something in a thread of its own, for whom must not wait for a broker that is slow to answer."""

    def __init__(self, open_it: Callable[[], Any]) -> None:
        self._opened: Future[Any] = Future()
        threading.Thread(target=self._run, args=(open_it,), name="kafka-open", daemon=True).start()

    def _run(self, open_it: Callable[[], Any]) -> None:
        try:
            self._opened.set_result(open_it())
        except BaseException as error:
            self._opened.set_exception(error)

    def wait(self, timeout_s: float) -> Any | None:
        """What was opened; None while that is not known. Raises what opening raised."""
        return self._opened.result() if wait_for([self._opened], timeout_s).done else None

    def give_up(self, close: Callable[[Any], object]) -> None:
        """Have closed what is opened yet."""
        self._opened.add_done_callback(lambda opened: close(opened.result()) if opened.exception() is None else None)


def one_line(error: Exception) -> str:
    """The kind of an error and what it says, for people."""
    text, name = " ".join(str(error).split()), type(error).__name__
    whole = text if text.startswith(name) else f"{name}: {text}"
    return whole.removesuffix(": ").removesuffix(": None")


def close_within(close: Callable[[], Any], timeout_s: float) -> bool:
    """Close in a thread of its own; False when that is not done in time, and goes on behind our back."""
    thread = threading.Thread(target=_quietly, args=(close,), name="kafka-close", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def _quietly(close: Callable[[], Any]) -> None:
    with suppress(Exception):  # it is given up anyway
        close()


class Throttle:
    """Lets a log line through now and then, so that weather does not fill the log."""

    def __init__(self, every_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._next: dict[str, float] = {}

    def __call__(self, what: str) -> bool:
        """True at the first call for `what`, and then at most once every `every_s`."""
        now = self._clock()
        if now < self._next.get(what, now):
            return False
        self._next[what] = now + self._every_s
        return True
