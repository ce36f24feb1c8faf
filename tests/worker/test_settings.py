"""Settings from the environment and an env file: clear errors, no secrets, and the README's table."""

import json
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from worker.config_view import (
    allowed,
    config_lines,
    load_settings,
    settings_table_markdown,
    show,
    variables,
)
from worker.redis_client import connect
from worker.settings import RedisSettings, Settings, SettingsError


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.upper().startswith("FRESHET_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch):
    def set_all(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"FRESHET_{name}", value)

    return set_all


def problems(env_file: Path | None = None) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as error:
        load_settings(env_file)
    assert str(error.value) == "\n".join(error.value.problems)
    assert error.value.__cause__ is None
    assert not isinstance(error.value.__context__, ValidationError)  # which shows what was given
    return error.value.problems


# ---- loading


def test_without_anything_the_defaults_hold() -> None:
    assert load_settings() == Settings()


def test_the_environment_goes_before_the_file(env, tmp_path: Path) -> None:
    file = tmp_path / "worker.env"
    file.write_text('# comment\nexport FRESHET_MODEL__DIM=32\nFRESHET_HTTP__PORT="9000"\nOTHER_PROGRAM=1\n')
    env(HTTP__PORT="9100", KAFKA__TOPICS="a, b")
    settings = load_settings(file)
    assert (settings.model.dim, settings.http.port, settings.kafka.topics) == (32, 9100, ("a", "b"))


def test_the_file_can_be_named_in_the_environment(env, tmp_path: Path) -> None:
    file = tmp_path / "worker.env"
    file.write_text("freshet_model__dim=48\n")
    env(ENV_FILE=str(file))
    assert load_settings().model.dim == 48
    other = tmp_path / "other.env"
    other.write_text("FRESHET_MODEL__DIM=16\n")
    assert load_settings(other).model.dim == 16  # the command line goes before the variable


def test_a_section_and_a_part_of_a_structure_can_be_given(env) -> None:
    env(HTTP='{"port": 81, "host": "::1"}', EVENTS__FIELDS='{"user_id": "$.u"}')
    settings = load_settings()
    assert (settings.http.port, settings.http.host, settings.events.fields) == (81, "::1", {"user_id": "$.u"})


def test_what_kubernetes_puts_beside_a_service_called_freshet_is_no_setting(env) -> None:
    env(SERVICE_HOST="10.0.0.1", SERVICE_PORT="8080", SERVICE_PORT_HTTP="8080", PORT="tcp://10.0.0.1:8080")
    env(PORT_8080_TCP="tcp://10.0.0.1:8080", PORT_8080_TCP_ADDR="10.0.0.1", WORKER_SERVICE_HOST="10.0.0.2")
    env(WORKER_PORT="tcp://10.0.0.2:80", WORKER_PORT_80_TCP_PROTO="tcp")
    assert load_settings() == Settings()


# ---- errors


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HTTP__PORT", "99999", ["FRESHET_HTTP__PORT=99999", "a whole number from 0 to 65535"]),
        ("HTTP__PORT", "http", ["FRESHET_HTTP__PORT=http", "a whole number"]),
        ("KAFKA__ON_GAP", "maybe", ["FRESHET_KAFKA__ON_GAP=maybe", "continue | stop"]),
        ("KAFKA__START", "yesterday", ["FRESHET_KAFKA__START=yesterday", "earliest, latest or an ISO-8601 time"]),
        ("KAFKA__BOOTSTRAP_SERVERS", "kafka:port", ["FRESHET_KAFKA__BOOTSTRAP_SERVERS=kafka:port", "host:port"]),
        ("KAFKA__BOOTSTRAP_SERVERS", "a:9092,", ["FRESHET_KAFKA__BOOTSTRAP_SERVERS=a:9092,", "host:port"]),
        ("KAFKA__BOOTSTRAP_SERVERS", "a:99999", ["FRESHET_KAFKA__BOOTSTRAP_SERVERS=a:99999", "host:port"]),
        ("KAFKA__TOPICS", "a,,b", ["FRESHET_KAFKA__TOPICS=a,,b", "a topic name is empty"]),
        ("KAFKA__SSL_CHECK_HOSTNAME", "jein", ["FRESHET_KAFKA__SSL_CHECK_HOSTNAME=jein", "true | false"]),
        ("MODEL__LEARNING_RATE", "0", ["FRESHET_MODEL__LEARNING_RATE=0", "a number above 0"]),
        ("MODEL__LEARNING_RATE", "inf", ["FRESHET_MODEL__LEARNING_RATE=inf", "a number above 0 to 10"]),
        ("RUNTIME__GRACE_S", "inf", ["FRESHET_RUNTIME__GRACE_S=inf", "a finite number"]),
        ("CHECKPOINT__EVERY_S", "nan", ["FRESHET_CHECKPOINT__EVERY_S=nan", "a finite number"]),
        ("EVENTS__TYPES", '{"forget": {}}', ["FRESHET_EVENTS__TYPES", "'forget' erases a user"]),
        ("REDIS__PREFIX", "a b", ["FRESHET_REDIS__PREFIX=a b"]),
        ("RUNTIME__DEVICE", "tpu", ["FRESHET_RUNTIME__DEVICE=tpu", "auto, cpu, cuda or cuda:N"]),
        ("EVENTS__FIELDS", "{", ["FRESHET_EVENTS__FIELDS: a JSON object is allowed"]),
        ("EVENTS__FIELDS", "[1]", ["FRESHET_EVENTS__FIELDS: a JSON object is allowed"]),
        ("EVENTS__TYPES", '{"click": {"weight": 1e9}}', ["FRESHET_EVENTS__TYPES at click.weight=1000000000.0"]),
        ("KAFKA", "no json", ["FRESHET_KAFKA: a JSON object is allowed"]),
        ("KAFKA__SECURITY_PROTOCOL", "SASL_SSL", ["FRESHET_KAFKA: sasl_mechanism is needed"]),
        (
            "KAFKA",
            '{"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "sasl_username": "me"}',
            ["FRESHET_KAFKA: sasl_username and sasl_password are needed with sasl_mechanism PLAIN"],
        ),
        ("MODEL__SEEN_ITEMS", "10", ["FRESHET_MODEL: seen_items (10) must be at least history (50)"]),
        ("KAFKA__TOPIC", "x", ["FRESHET_KAFKA__TOPIC", "did you mean FRESHET_KAFKA__TOPICS?"]),
        ("KAFKA_TOPICS", "x", ["FRESHET_KAFKA_TOPICS", "did you mean FRESHET_KAFKA__TOPICS?"]),
        ("HTTP_PORT", "80", ["FRESHET_HTTP_PORT", "did you mean FRESHET_HTTP__PORT?"]),
        ("QQQ", "80", ["FRESHET_QQQ", "lists all"]),
        ("HTTP", '{"prot": 80}', ["FRESHET_HTTP__PROT: no such setting; did you mean FRESHET_HTTP__PORT?"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_variable(env, name: str, value: str, shown: list[str]) -> None:
    env(**{name: value})
    (problem,) = problems()
    assert "\n" not in problem
    for part in shown:
        assert part in problem


@pytest.mark.parametrize("servers", ["a", "a:1, b-c.d_e:65535", "[::1]:9092", "SASL_SSL://pkc.cloud:9092", "用户:9092"])
def test_brokers_are_named_in_the_usual_ways(env, servers: str) -> None:
    env(KAFKA__BOOTSTRAP_SERVERS=servers)
    assert load_settings().kafka.bootstrap_servers == servers


def test_every_mistake_has_its_line(env) -> None:
    env(HTTP__PORT="-1", MODEL__DIM="0", CHECKPOINT__KEEP="x")
    assert len(problems()) == 3
    env(KAFKA__TOPIC="x", HTPP__PORT="1")
    assert len(problems()) == 2  # first the names, then the values


@pytest.mark.parametrize(
    "url",
    [
        "http://:s3cret@host",
        "redis://:s3cret@host:port",
        "redis://:s3cret#s3cret@host:6379/0",
        "redis://:12?s3cret@host:6379/0",
        "redis://:12/s3cret@host",
        "redis://:s3cret@host:6379/database",
        "redis://:s3cret@:6379/0",
        "redis://:s3cret@host:0",
        "redis://[s3cret",
        "unix://",
        "s3cret",
        "",
    ],
)
def test_a_wrong_url_is_refused_without_being_shown(env, url: str) -> None:
    env(REDIS__URL=url)
    (problem,) = problems()
    assert problem.startswith("FRESHET_REDIS__URL: allowed: redis://:password@host:port/db, rediss://")
    assert "s3cret" not in problem


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://localhost:6379/0",
        "rediss://user:p%23ss@redis.example.org:6380/3",
        "redis://[::1]:6379/0?socket_timeout=3",
        "unix:///run/redis.sock?db=1&password=s3cret",
    ],
)
def test_every_form_of_url_is_taken(url: str) -> None:
    connect(RedisSettings(url=SecretStr(url))).close()


def test_no_error_shows_a_secret(env) -> None:
    env(KAFKA__SASL_PASSWORD="s3cret", KAFKA__SECURITY_PROTOCOL="SASL_SSL", REDIS__URL="redis://:s3cret@h:x")
    env(KAFKA__BOOTSTRAP_SERVERS="", HTTP__HOST="redis://:s3cret@h", HTTP__PORT="redis://:s3cret@h")
    text = "\n".join(problems())
    assert "s3cret" not in text
    assert "FRESHET_HTTP__PORT=redis://***@h" in text


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.env"
    assert problems(missing) == (f"the env file {missing} cannot be read: No such file or directory",)
    latin = tmp_path / "latin.env"
    latin.write_bytes("FRESHET_REDIS__PREFIX=caf\xe9\n".encode("latin-1"))
    assert problems(latin) == (f"the env file {latin} cannot be read: not UTF-8",)
    broken = tmp_path / "broken.env"
    broken.write_text("FRESHET_MODEL__DIM=32\nwhat is 'this\nFRESHET_MODEL__SEED=1\n")
    assert problems(broken) == (f"the env file {broken}, line 2: not NAME=value",)


def test_an_unknown_name_in_the_file_says_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "worker.env"
    file.write_text("FRESHET_MODEL__DIMM=32\n")
    expected = f"FRESHET_MODEL__DIMM (in {file}): no such setting; did you mean FRESHET_MODEL__DIM?"
    assert problems(file) == (expected,)


# ---- the views


def test_the_view_shows_every_setting_with_value_source_and_help(env, tmp_path: Path) -> None:
    file = tmp_path / "worker.env"
    file.write_text("FRESHET_MODEL__DIM=32\nFRESHET_HTTP__PORT=1\n")
    env(HTTP__PORT="2", KAFKA='{"topics": "x,y"}', REDIS__URL="rediss://me:s3cret@h:1/2", KAFKA__SASL_PASSWORD="s3cret")
    env(EVENTS__TYPES__CLICK__WEIGHT="2")
    lines = {line.env: line for line in config_lines(load_settings(file), file)}
    assert lines.keys() == {variable.env for variable in variables()}
    shown = {name: (line.value, line.source) for name, line in lines.items()}
    assert shown["FRESHET_MODEL__DIM"] == ("32", str(file))
    assert shown["FRESHET_HTTP__PORT"] == ("2", "environment")
    assert shown["FRESHET_KAFKA__TOPICS"] == ("x,y", "environment")
    assert shown["FRESHET_KAFKA__GROUP_ID"] == ("freshet", "default")
    assert shown["FRESHET_REDIS__URL"] == ("rediss://***@h:1/2", "environment")
    assert shown["FRESHET_KAFKA__SASL_PASSWORD"] == ("***", "environment")
    assert shown["FRESHET_KAFKA__SSL_PASSWORD"] == ("", "default")
    assert shown["FRESHET_EVENTS__TYPES"][1] == "environment"
    assert all(line.help for line in lines.values())
    text = "\n".join(map(str, lines.values()))
    assert "s3cret" not in text
    assert len(text.splitlines()) == len(lines)
    assert f"FRESHET_MODEL__DIM=32  [{file}]  width of an embedding" in text


def test_what_the_view_shows_can_be_given_back(env) -> None:
    """Every value is shown as it would be written in the environment."""
    before = Settings()
    env(**{v.env.removeprefix("FRESHET_"): show(v.default) for v in variables() if not v.secret or v.name == "url"})
    assert load_settings() == before


def test_the_table_has_a_row_for_every_setting() -> None:
    table = settings_table_markdown()
    rows = [line for line in table.splitlines() if line.startswith("| `FRESHET_")]
    assert [row.split("`")[1] for row in rows] == [variable.env for variable in variables()]
    for row in rows:
        cells = row.replace("\\|", "").split("|")
        assert len(cells) == 6, row
        assert cells[4].strip(), row
    assert "| `FRESHET_HTTP__PORT` | `8080` | a whole number from 0 to 65535 | port to listen on" in table


def test_every_setting_has_a_help_text_of_one_line() -> None:
    for variable in variables():
        assert variable.help, variable.env
        assert "\n" not in variable.help
        assert allowed(variable.field)


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.http.port = 1
    with pytest.raises(ValueError, match="frozen"):
        settings.http = settings.http


def test_secrets_do_not_show_in_the_settings_themselves(env) -> None:
    env(KAFKA__SASL_PASSWORD="s3cret", REDIS__URL="redis://:s3cret@h")
    settings = load_settings()
    assert "s3cret" not in repr(settings) + str(settings) + json.dumps(settings.model_dump(mode="json"))
