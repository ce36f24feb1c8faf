"""The worker's settings: from the environment (`FRESHET_KAFKA__TOPICS=…`) or an env file; frozen."""

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from model.config import ModelConfig
from worker.events import FORGET
from worker.field_map import FieldMap

ENV_PREFIX = "FRESHET_"
# A protocol before it is ignored, as other clients of Kafka do; an IPv6 address stands in brackets.
_SERVER = re.compile(r"(\w+://)?(\[[0-9A-Fa-f:.%]+\]|[^\s:/@\[\]]+)(:(?P<port>\d{1,5}))?")


class SettingsError(ValueError):
    """Settings that cannot work: each problem in one line, with the variable's name and what is allowed."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class KafkaSettings(_Section):
    """Where events come from. Security settings are handed to kafka-python as they are."""

    bootstrap_servers: str = Field("localhost:9092", description="comma-separated host:port list")
    topics: Annotated[tuple[str, ...], NoDecode] = Field(("clicks",), description="topics to read, comma-separated")
    items_topic: str = Field(
        "", description="topic that describes the items, read from its beginning; empty = there is none"
    )
    group_id: str = Field("freshet", description="group under which positions are committed, for lag dashboards only")
    start: str = Field("earliest", description="where a first start reads from: earliest, latest or an ISO-8601 time")
    on_gap: Literal["continue", "stop"] = Field(
        "continue",
        description="when retention has passed the saved position: go on from the earliest, or stop",
    )
    isolation_level: Literal["read_committed", "read_uncommitted"] = Field(
        "read_committed", description="records of aborted transactions are left out by read_committed"
    )
    max_poll_records: int = Field(2000, ge=1, description="most records taken at once")
    fetch_max_wait_ms: int = Field(20, ge=0, description="longest the broker holds an empty fetch")
    request_timeout_ms: int = Field(30_000, ge=1000, description="limit of one request to the broker")
    metadata_max_age_ms: int = Field(30_000, ge=100, description="how often new partitions and topics are looked for")
    dead_letter_suffix: str = Field(
        ".dead-letter", description="rejected records go to <topic><suffix>; empty = they are only counted"
    )
    dead_letter_buffer: int = Field(
        10_000, ge=1, description="rejected records that wait while their topic cannot be written"
    )
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="how the broker is talked to"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", ""] = Field(
        "", description="SASL mechanism, with a SASL protocol"
    )
    sasl_username: str = Field("", description="SASL user name")
    sasl_password: SecretStr = Field(SecretStr(""), description="SASL password")
    ssl_cafile: str = Field("", description="file of the authorities that sign the broker's certificate")
    ssl_certfile: str = Field("", description="client certificate")
    ssl_keyfile: str = Field("", description="key of the client certificate")
    ssl_password: SecretStr = Field(SecretStr(""), description="password of the client key")
    ssl_check_hostname: bool = Field(True, description="the broker's certificate must name its host")

    @field_validator("bootstrap_servers")
    @classmethod
    def _servers(cls, value: str) -> str:
        for server in value.split(","):
            found = _SERVER.fullmatch(server.strip())
            if found is None or not 1 <= int(found["port"] or 9092) <= 65_535:
                raise ValueError("allowed: host:port, several separated by commas")
        return value

    @field_validator("topics", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if isinstance(parts, (list, tuple)) and not all(parts):
            raise ValueError("a topic name is empty; give names separated by commas")
        return parts

    @field_validator("topics")
    @classmethod
    def _some_topic(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("at least one topic is needed")
        if len(set(value)) != len(value):
            raise ValueError("a topic is named twice")
        return value

    @field_validator("start")
    @classmethod
    def _start(cls, value: str) -> str:
        if value not in ("earliest", "latest"):
            try:
                datetime.fromisoformat(value)
            except ValueError:
                raise ValueError("allowed: earliest, latest or an ISO-8601 time") from None
        return value

    @property
    def all_topics(self) -> tuple[str, ...]:
        """The topics of events and that of the items, if there is one."""
        return (*self.topics, *([self.items_topic] if self.items_topic else []))

    @model_validator(mode="after")
    def _items_have_a_topic_of_their_own(self) -> "KafkaSettings":
        if self.items_topic in self.topics:
            raise ValueError(f"items_topic {self.items_topic!r} is among topics; items need a topic of their own")
        return self

    @model_validator(mode="after")
    def _sasl_is_whole(self) -> "KafkaSettings":
        if not self.security_protocol.startswith("SASL"):
            return self
        if not self.sasl_mechanism:
            raise ValueError("sasl_mechanism is needed with security_protocol " + self.security_protocol)
        if self.sasl_mechanism != "GSSAPI" and not (self.sasl_username and self.sasl_password.get_secret_value()):
            raise ValueError("sasl_username and sasl_password are needed with sasl_mechanism " + self.sasl_mechanism)
        return self


class EventTypeSettings(_Section):
    """What an event of one type does."""

    observe: bool = Field(True, description="enters histories and counts as seen")
    weight: float = Field(
        1.0,
        ge=-100,
        le=100,
        allow_inf_nan=False,
        description="weight of its gradient: 0 = none, negative = a negative example",
    )


def _default_event_types() -> dict[str, EventTypeSettings]:
    observed = {name: EventTypeSettings() for name in ("click", "view", "purchase", "rating")}
    return observed | {"impression": EventTypeSettings(observe=False, weight=0.0)}


class EventSettings(_Section):
    """How records become events."""

    fields: dict[str, str] = Field(
        default_factory=dict,
        description='where other topics keep the fields, as JSON: {"user_id": "$.context.uid"}',
    )
    types: dict[str, EventTypeSettings] = Field(
        default_factory=_default_event_types, description="event types and what each does, as JSON"
    )
    max_record_bytes: int = Field(1_000_000, ge=256, description="longer records are rejected")
    max_future_s: int = Field(86_400, ge=0, description="a timestamp further past the record's own is rejected")
    dedup_window: int = Field(100_000, ge=0, description="event ids remembered, at least; repeated ones are dropped")

    @field_validator("fields")
    @classmethod
    def _places(cls, value: dict[str, str]) -> dict[str, str]:
        FieldMap(value)  # raises for what is no place
        return value

    @field_validator("types")
    @classmethod
    def _forget_is_taken(cls, value: dict[str, EventTypeSettings]) -> dict[str, EventTypeSettings]:
        if FORGET in value:
            raise ValueError(f"{FORGET!r} erases a user and cannot be given another meaning")
        return value


class ItemSettings(_Section):
    """What is kept of what the items topic says."""

    capacity: int = Field(
        100_000, ge=1, description="descriptions kept; past it the least recently described items lose theirs"
    )
    max_title_bytes: int = Field(512, ge=1, le=65_536, description="a longer title is rejected")
    max_attributes_bytes: int = Field(
        4096, ge=2, le=1_000_000, description="attributes that are longer, as compact JSON, are rejected"
    )


class RedisSettings(_Section):
    """Where vectors are published."""

    url: SecretStr = Field(
        SecretStr("redis://localhost:6379/0"),
        description="redis://, rediss:// (TLS) or unix://, with the password",
    )
    prefix: str = Field("rec", min_length=1, max_length=64, pattern=r"^[^\s{}]+$", description="of every key")
    ttl_s: int = Field(0, ge=0, description="user and item keys expire after this; 0 = never")
    timeout_s: float = Field(2.0, gt=0, description="limit of one call")
    ssl_cafile: str = Field("", description="file of the authorities that sign the server's certificate")

    @field_validator("url")
    @classmethod
    def _url(cls, value: SecretStr) -> SecretStr:
        # The message shows no part of it: in a wrong URL the password can be anywhere.
        if not _is_redis_url(value.get_secret_value()):
            raise ValueError(
                "allowed: redis://:password@host:port/db, rediss://... (TLS) or unix:///path; "
                "special characters of a password are written as %XX"
            )
        return value


def _is_redis_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        valid_port = parts.port != 0
    except ValueError:
        return False
    if "#" in url or not valid_port:
        return False
    if parts.scheme == "unix":
        return parts.path.strip("/") != ""
    database = parts.path.strip("/")
    return parts.scheme in ("redis", "rediss") and bool(parts.hostname) and (not database or database.isdecimal())


class PublishSettings(_Section):
    """What is published when."""

    max_users: int = Field(2000, ge=1, description="users in one server-side write")
    recent_items: int = Field(50, ge=0, le=1000, description="newest item ids published with a user")
    top: int = Field(0, ge=0, le=1000, description="best items published with a user in `rec:top:<id>`, 0 = none")
    diversity: float = Field(
        0.0, ge=0, lt=1, description="of `rec:top`: 0 = by score alone, towards 1 = unlike each other before all else"
    )
    fitted_at_once: int = Field(
        100, ge=1, description="users fitted to the full score in one turn; past it the family's part goes out first"
    )
    item_interval_s: float = Field(2.0, ge=0, description="shortest time between two rounds of item vectors")
    item_tolerance: float = Field(
        0.01, ge=0, description="an item is published again when its vector moved by more than this share"
    )
    background_per_s: int = Field(
        200, ge=0, description="quiet users published again per second, since weights move under them"
    )
    popular: int = Field(1000, ge=0, description="items in the popularity list")
    heartbeat_s: float = Field(1.0, gt=0, description="time between two heartbeats")
    stats_length: int = Field(3600, ge=1, description="heartbeats kept in the stats stream")


class CheckpointSettings(_Section):
    """Where and when the model is saved."""

    dir: Path = Field(Path("checkpoints"), description="folder of this worker's checkpoints, locked by it")
    every_events: int = Field(100_000, ge=1, description="save after this many events")
    every_s: float = Field(60.0, gt=0, description="save after this time, if there were events")
    keep: int = Field(3, ge=1, description="newest checkpoints kept")


class EvaluationSettings(_Section):
    """Prequential metrics: each event is ranked before it is learned."""

    share: float = Field(1.0, ge=0, le=1, description="share of the events that is ranked; 0 = none")
    window: int = Field(10_000, ge=1, description="ranked events in the windowed figures")


class HttpSettings(_Section):
    """Health and metrics of the worker."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 in a container")
    port: int = Field(8080, ge=0, le=65_535, description="port to listen on; 0 = a free one")
    stale_after_s: float = Field(60.0, gt=0, description="/healthz fails when the loop has not turned for this long")


class LogSettings(_Section):
    """Logs go to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level shown")
    format: Literal["auto", "json", "console"] = Field(
        "auto", description="json for machines, console for people, auto = console on a terminal"
    )


class RuntimeSettings(_Section):
    """How the process runs."""

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    threads: int = Field(0, ge=0, le=256, description="CPU threads of torch; 0 = what the machine or container allows")
    deterministic: bool = Field(False, description="same stream, settings and seed: same bits (CPU, one partition)")
    max_wait_ms: int = Field(
        1000, ge=0, description="a mini-batch that has waited this long is learned unfilled; 0 = never"
    )
    grace_s: float = Field(20.0, gt=0, description="longest a stop may take")


class Settings(BaseSettings):
    """All settings. A variable is FRESHET_<SECTION>__<NAME>; the environment goes before the env file."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_file_encoding="utf-8",
        dotenv_filtering="only_existing",  # an env file may hold other programs' variables too
        frozen=True,
        extra="forbid",
    )

    kafka: KafkaSettings = Field(default_factory=KafkaSettings)
    events: EventSettings = Field(default_factory=EventSettings)
    items: ItemSettings = Field(default_factory=ItemSettings)
    redis: RedisSettings = Field(default_factory=RedisSettings)
    publish: PublishSettings = Field(default_factory=PublishSettings)
    model: ModelConfig = Field(default_factory=ModelConfig)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    runtime: RuntimeSettings = Field(default_factory=RuntimeSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    log: LogSettings = Field(default_factory=LogSettings)
