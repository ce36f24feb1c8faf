"""Clients of kafka-python, opened and closed in bounded time."""

import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kafka import KafkaConsumer
from kafka.errors import KafkaConfigurationError
from kafka.net.compat import KafkaNetClient

from worker.settings import KafkaSettings
from worker.source import SourceError

CLOSE_S = 2.0
_BOOTSTRAP_MS = 1000


def client_options(settings: KafkaSettings) -> dict[str, Any]:
    """What every client of kafka-python is given. Raises SourceError for certificates that cannot be read."""
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

    Waits for the broker for a second at most, then raises one of kafka-python's errors. Raises SourceError for
    settings that cannot work.
    """
    fixed = {"enable_auto_commit": False, "auto_offset_reset": "none", "isolation_level": settings.isolation_level}
    # kafka-python does not hand this on to its metadata: asking for a topic would create it.
    metadata = {"allow_auto_create_topics": False}
    consumer, client = open_client(KafkaConsumer, metadata, **client_options(settings), **options, **fixed)
    try:
        return consumer, client.cluster, client.cluster.set_topics(settings.topics)
    except (ValueError, TypeError) as error:
        close_within(consumer.close, CLOSE_S)
        raise SourceError(f"kafka.topics: {error}") from None


def open_client(make: Callable[..., Any], metadata: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """A consumer or producer and its KafkaNetClient; `metadata` are settings of the latter's metadata.

    Raises one of kafka-python's errors, or SourceError for settings that cannot work.
    """
    opened: list[Any] = []

    def client(**config: Any) -> Any:
        opened.append(KafkaNetClient(**config))
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
        raise


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

    def __init__(self, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._next: dict[str, float] = {}

    def __call__(self, what: str) -> bool:
        """True at the first call for `what`, and then at most once every `every_s`."""
        now = self._clock()
        if now < self._next.get(what, now):
            return False
        self._next[what] = now + self._every_s
        return True
