"""How this project talks to Redis: explicit limits, no hidden retries, errors told apart."""

import ssl
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterCrossSlotError,
    ClusterError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from worker.redact import mask_url
from worker.settings import ENV_PREFIX, RedisSettings, SettingsError

# The first that fits. Subclasses come before their bases.
_KINDS: tuple[tuple[type[RedisError], str], ...] = (
    (ReadOnlyError, "readonly"),
    (BusyLoadingError, "loading"),
    (OutOfMemoryError, "oom"),
    (AuthenticationError, "auth"),
    (NoPermissionError, "noperm"),
    (MasterDownError, "masterdown"),
    (MovedError, "cluster"),
    (ClusterCrossSlotError, "cluster"),
    (ClusterError, "cluster"),
    (TimeoutError, "timeout"),
    (ConnectionError, "connection"),
)


def connect(settings: RedisSettings) -> Redis:
    """A client (bytes in and out) that opens its connection at the first call and never retries by itself.

    One call is bounded by `timeout_s` for the connection and for each wait on the socket. SettingsError
    for a URL with options that do not exist, or authorities that cannot be read.
    """
    url = settings.url.get_secret_value()
    options: dict[str, Any] = {
        "socket_timeout": settings.timeout_s,
        "socket_connect_timeout": settings.timeout_s,
        "retry": Retry(NoBackoff(), 0),
        # RESP2 and no CLIENT commands: nothing that an old server or a narrow ACL refuses
        "protocol": 2,
        "driver_info": None,
    }
    if settings.ssl_cafile and url.startswith("rediss://"):
        options["ssl_ca_certs"] = _authorities(settings.ssl_cafile)
    try:
        client = Redis.from_url(url, **options)
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # not connected: only its options are looked at
    except (TypeError, ValueError) as error:
        raise SettingsError([f"{ENV_PREFIX}REDIS__URL: {mask_url(str(error))}"]) from None
    return client


def _authorities(path: str) -> str:
    """`path`, if it can be used: redis-py would tell at every call, as if the server were out of reach."""
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:  # an SSLError is one too
        raise SettingsError([f"{ENV_PREFIX}REDIS__SSL_CAFILE={path}: {error.strerror or error}"]) from None
    return path


def error_kind(error: Exception) -> str:
    """One word of a closed list for what is wrong, for metrics and logs."""
    for kind, word in _KINDS:
        if isinstance(error, kind):
            return word
    if isinstance(error, ResponseError):
        # redis-py has no classes for these: a server that refuses writes because it cannot save, one that ends a
        # long first command of a client who should have logged in, and a right that a command in a script lacks
        special = {
            "MISCONF": "misconf",
            "Protocol error: unauthenticated": "auth",
            "ACL failure in script": "noperm",
        }
        return next((kind for start, kind in special.items() if str(error).startswith(start)), "response")
    return "connection" if isinstance(error, OSError) else "other"


def describe(error: Exception) -> str:
    """The error in one line, without secrets."""
    return f"{error_kind(error)}: {mask_url(' '.join(str(error).split()))}"
