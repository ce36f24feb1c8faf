"""How this package reaches Kafka: the same environment variables as the worker's, and topics."""

import os
from collections.abc import Mapping
from typing import Any

from kafka import KafkaAdminClient
from kafka.errors import KafkaConnectionError, KafkaError, KafkaTimeoutError, TopicAlreadyExistsError

PREFIX = "FRESHET_KAFKA__"
BOOTSTRAP_TIMEOUT_MS = 10_000
# variable -> option of kafka-python
_TEXTS = {
    "SECURITY_PROTOCOL": "security_protocol",
    "SASL_MECHANISM": "sasl_mechanism",
    "SASL_USERNAME": "sasl_plain_username",
    "SASL_PASSWORD": "sasl_plain_password",
    "SSL_CAFILE": "ssl_cafile",
    "SSL_CERTFILE": "ssl_certfile",
    "SSL_KEYFILE": "ssl_keyfile",
    "SSL_PASSWORD": "ssl_password",
}


class KafkaUnavailableError(Exception):
    """Kafka or a topic cannot be used; the message is for people, in one line."""


def default_bootstrap_servers(environment: Mapping[str, str] = os.environ) -> str:
    return environment.get(PREFIX + "BOOTSTRAP_SERVERS") or "localhost:9092"


def default_topic(environment: Mapping[str, str] = os.environ) -> str:
    """The first of the worker's topics."""
    return (environment.get(PREFIX + "TOPICS") or "clicks").split(",")[0].strip()


def default_items_topic(environment: Mapping[str, str] = os.environ) -> str | None:
    """The worker's topic of descriptions, if there is one."""
    return environment.get(PREFIX + "ITEMS_TOPIC") or None


def security_options(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What kafka-python is told of TLS and SASL, from the variables that the worker reads too."""
    given = {option: environment.get(PREFIX + name) for name, option in _TEXTS.items()}
    options: dict[str, Any] = {option: text for option, text in given.items() if text}
    check = environment.get(PREFIX + "SSL_CHECK_HOSTNAME", "true").strip().lower()
    return options | {"ssl_check_hostname": check not in ("false", "0", "no", "off", "f", "n")}


def create_topic(
    bootstrap_servers: str,
    name: str,
    partitions: int = 1,
    configs: Mapping[str, str] | None = None,
    **client_options: Any,
) -> bool:
    """Create a topic and wait until it can be written; False if it exists already.

    `client_options` go to kafka-python's admin client (security, timeouts). Raises its KafkaError.
    """
    with _admin(bootstrap_servers, client_options) as admin:
        return _create(admin, name, partitions, configs or {})


def _admin(bootstrap_servers: str, client_options: Mapping[str, Any]) -> Any:
    options = {"bootstrap_timeout_ms": BOOTSTRAP_TIMEOUT_MS} | dict(client_options)
    return KafkaAdminClient(bootstrap_servers=bootstrap_servers.split(","), **options)


def _create(admin: Any, name: str, partitions: int, configs: Mapping[str, str]) -> bool:
    try:
        admin.create_topics({name: {"num_partitions": partitions, "configs": dict(configs)}})
    except TopicAlreadyExistsError:
        return False
    admin.wait_for_topics([name])
    return True


def ensure_topic(
    bootstrap_servers: str,
    name: str,
    create_partitions: int | None,
    configs: Mapping[str, str] | None = None,
    **client_options: Any,
) -> None:
    """Make sure that Kafka answers and has the topic, which is created if `create_partitions` is given.

    Raises KafkaUnavailableError.
    """
    try:
        with _admin(bootstrap_servers, client_options) as admin:
            if name in admin.list_topics():
                return
            if create_partitions is None:
                raise KafkaUnavailableError(
                    f"there is no topic {name!r} at {bootstrap_servers}; --create-topic makes it"
                )
            _create(admin, name, create_partitions, configs or {})
    except (KafkaError, OSError, ValueError) as error:
        raise unavailable(bootstrap_servers, error) from error


def unavailable(bootstrap_servers: str, error: Exception) -> KafkaUnavailableError:
    """One line for any of kafka-python's errors."""
    if isinstance(error, (KafkaTimeoutError, KafkaConnectionError)):
        limit_s = BOOTSTRAP_TIMEOUT_MS // 1000
        return KafkaUnavailableError(
            f"Kafka at {bootstrap_servers} cannot be reached, or does not let us in, within {limit_s} s"
        )
    text = " ".join(str(error).split()) or type(error).__name__
    return KafkaUnavailableError(f"Kafka at {bootstrap_servers}: {text[:300]}")
