"""The Docker files: no Docker engine is needed to know that they say what they should."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prometheus_client import CollectorRegistry

from replay.local_stack import KafkaBroker, free_port
from tests.conftest import broker_kind
from tests.deployment import ROOT, read_yaml, schema, seconds, settings_of, validate
from worker.http import Health, HttpServer
from worker.settings import HttpSettings

BASE, GPU = "docker-compose.yml", "docker-compose.gpu.yml"


def merged(base: Any, override: Any) -> Any:
    """As Compose merges files: mappings are merged, everything else is replaced (no list is in both)."""
    if isinstance(base, dict) and isinstance(override, dict):
        return {**base, **{name: merged(base.get(name), value) for name, value in override.items()}}
    assert not isinstance(base, list), "Compose would append to this list"
    return deepcopy(override)


def compose(*files: str) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for file in files:
        whole = merged(whole, read_yaml(file)[0])
    return whole


VARIANTS = [(BASE,), (BASE, GPU)]
variants = pytest.mark.parametrize("files", VARIANTS, ids=["cpu", "gpu"])


@pytest.mark.parametrize("file", [BASE, GPU])
def test_each_file_follows_the_compose_specification(file: str) -> None:
    validate(read_yaml(file)[0], schema("compose-spec"))


@variants
def test_the_files_together_follow_the_compose_specification(files: tuple[str, ...]) -> None:
    validate(compose(*files), schema("compose-spec"))


def test_the_schema_finds_a_misspelt_key() -> None:
    broken = compose(BASE)
    broken["services"]["worker"]["stop_grace"] = "45s"
    with pytest.raises(jsonschema.ValidationError):
        validate(broken, schema("compose-spec"))


@variants
def test_every_variable_of_ours_is_a_setting_with_an_allowed_value(
    files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in compose(*files)["services"].values():
        ours = {n: v for n, v in service.get("environment", {}).items() if n.startswith("FRESHET_")}
        assert all(isinstance(value, str) for value in ours.values()), "YAML must not read a value as something else"
        settings_of(ours, monkeypatch)


def worker_settings(files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Any:
    from_image = image_environment()
    ours = {name: value for name, value in from_image.items() if name.startswith("FRESHET_")}
    return settings_of({**ours, **compose(*files)["services"]["worker"]["environment"]}, monkeypatch)


@variants
def test_the_worker_has_more_time_to_stop_than_it_takes(
    files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = compose(*files)["services"]["worker"]
    assert seconds(worker["stop_grace_period"]) > worker_settings(files, monkeypatch).runtime.grace_s + 10


@variants
def test_the_worker_listens_inside_and_is_published_on_loopback_alone(
    files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = worker_settings(files, monkeypatch)
    assert settings.http.host == "0.0.0.0"
    assert compose(*files)["services"]["worker"]["ports"] == [f"127.0.0.1:{settings.http.port}:{settings.http.port}"]


def test_nothing_is_published_beyond_loopback() -> None:
    for name, service in compose(BASE)["services"].items():
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), f"{name}: {port}"


def test_the_worker_reaches_the_other_services_and_the_host_reaches_them_with_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = compose(BASE)["services"]
    inside, outside = worker_settings((BASE,), monkeypatch), settings_of({}, monkeypatch)
    advertised = dict(a.split("://") for a in services["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].split(","))
    assert inside.kafka.bootstrap_servers == advertised["INTERNAL"]
    assert outside.kafka.bootstrap_servers == advertised["HOST"]
    assert services["kafka"]["ports"] == [f"127.0.0.1:{port_of(advertised['HOST'])}:{port_of(advertised['HOST'])}"]
    assert inside.redis.url.get_secret_value() == "redis://redis:6379/0"
    assert services["redis"]["ports"] == ["127.0.0.1:6379:6379"]


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


def test_the_topics_that_the_worker_needs_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = worker_settings((BASE,), monkeypatch).kafka
    needed = {*settings.all_topics, *(topic + settings.dead_letter_suffix for topic in settings.all_topics)}
    script = compose(BASE)["services"]["topics"]["command"][0]
    listed = re.search(r"for topic in (.+); do", script)
    assert listed
    assert "--if-not-exists" in script, "the second `up` finds them there"
    assert set(listed[1].split()) == needed


def test_everything_starts_after_what_it_needs() -> None:
    services = compose(BASE)["services"]
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services, f"{name} needs {needed}"
            if how["condition"] == "service_healthy":
                assert services[needed]["healthcheck"]["test"]
            else:
                assert how["condition"] == "service_completed_successfully"
                assert services[needed]["restart"] == "no", f"{needed} would never have completed"
    assert services["worker"]["depends_on"].keys() == {"topics", "redis"}
    assert services["topics"]["depends_on"].keys() == {"kafka"}


def test_what_stays_up_has_a_health_check() -> None:
    for name, service in compose(BASE)["services"].items():
        if service["restart"] != "no":
            in_image = "build" in service and "HEALTHCHECK" in instructions()
            assert service.get("healthcheck", {}).get("test") or in_image, name


@variants
def test_volumes_are_named_declared_and_used(files: tuple[str, ...]) -> None:
    whole = compose(*files)
    mounts = [mount for service in whole["services"].values() for mount in service.get("volumes", [])]
    assert {mount.split(":")[0] for mount in mounts} == whole["volumes"].keys()


def test_the_data_folders_are_on_volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    services = compose(BASE)["services"]
    mounted = {name: [m.split(":")[1] for m in service.get("volumes", [])] for name, service in services.items()}
    assert services["kafka"]["environment"]["KAFKA_LOG_DIRS"] in mounted["kafka"]
    checkpoints = worker_settings((BASE,), monkeypatch).checkpoint.dir
    assert any(checkpoints.is_relative_to(folder) for folder in mounted["worker"])


@variants
def test_ours_run_without_rights_they_do_not_need(files: tuple[str, ...]) -> None:
    for name in ("worker", "replay"):
        service = compose(*files)["services"][name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["tmpfs"] == ["/tmp"]


@variants
def test_the_worker_and_replay_are_one_image_that_is_built_and_never_pulled(files: tuple[str, ...]) -> None:
    services = compose(*files)["services"]
    assert services["worker"]["image"] == services["replay"]["image"]
    assert (services["worker"]["pull_policy"], services["replay"]["pull_policy"]) == ("build", "never")
    assert services["worker"]["build"]["context"] == "."
    assert services["worker"]["build"]["args"].keys() == set(arguments())


def test_the_gpu_variant_takes_one_gpu_and_no_cpu_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_settings((BASE, GPU), monkeypatch).runtime.device == "cuda"
    devices = compose(BASE, GPU)["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]


def test_every_variable_of_the_host_has_a_default() -> None:
    for file in (BASE, GPU):
        for name in re.findall(r"(?<!\$)\$\{?([A-Z_]+[^}\s]*)", (ROOT / file).read_text()):
            assert name.endswith(":-"), f"{file}: {name}"


def test_the_replay_service_runs_a_command_that_there_is() -> None:
    from replay.__main__ import _parser

    service = compose(BASE)["services"]["replay"]
    assert service["entrypoint"] == ["python", "-m", "replay"]
    _parser().parse_args(service["command"])


# ---- the image


def instructions() -> dict[str, list[str]]:
    """The Dockerfile's instructions, by name, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            found.setdefault(name, []).append(rest.strip())
    return found


def arguments() -> dict[str, str]:
    return {name: value.strip('"') for name, _, value in (a.partition("=") for a in instructions()["ARG"])}


def image_environment() -> dict[str, str]:
    assignments = (part for line in instructions()["ENV"] for part in shlex.split(line))
    return {name: value for name, _, value in (part.partition("=") for part in assignments)}


def test_torch_comes_from_plain_pip_unless_an_index_is_given() -> None:
    assert arguments() == {"TORCH_INDEX": ""}
    torch = next(line for line in instructions()["RUN"] if line.endswith(" torch"))
    assert install_arguments(torch, "") == ["--no-deps", "-c", "constraints.txt", "torch"]
    chosen = install_arguments(torch, "https://index.example/cpu")
    assert chosen == ["--index-url", "https://index.example/cpu", "--no-deps", "-c", "constraints.txt", "torch"]


def install_arguments(line: str, index: str) -> list[str]:
    """What a shell hands to pip, after `install --no-cache-dir`."""
    program = f'pip() {{ printf "%s\\n" "$@"; }}\n{line}'
    done = subprocess.run(["sh", "-c", program], env={"TORCH_INDEX": index}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:2] == ["install", "--no-cache-dir"]
    return done.stdout.splitlines()[2:]


def test_every_installation_is_pinned() -> None:
    installs = [line for line in instructions()["RUN"] if "pip install" in line]
    assert len(installs) == 2
    assert all("-c constraints.txt" in line for line in installs)


def test_the_image_runs_the_worker_as_nobody_in_particular() -> None:
    found = instructions()
    assert json.loads(found["ENTRYPOINT"][0]) == ["python", "-m", "worker"], "exec form: signals reach the worker"
    assert "CMD" not in found, "what follows the image's name is the worker's own arguments"
    user, _, group = found["USER"][0].partition(":")
    assert int(user) > 0 < int(group)


def test_the_image_writes_to_its_volume_and_to_tmp_alone() -> None:
    environment = image_environment()
    assert environment["NUMBA_CACHE_DIR"].startswith("/tmp/")
    assert environment["FRESHET_CHECKPOINT__DIR"].startswith("/var/lib/freshet/")
    assert instructions()["WORKDIR"][-1] == "/var/lib/freshet"
    assert "--home-dir /tmp" in instructions()["RUN"][-1]
    assert environment["PYTHONSAFEPATH"] == "1"


def test_everything_the_image_copies_is_there_and_reaches_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    copied = [line.split() for line in instructions()["COPY"] if not line.startswith("--from")]
    sources = [source for line in copied for source in line[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    assert sorted(sources) == sorted(kept)


def test_the_image_has_all_that_the_package_is_built_from() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    sources = {source for line in instructions()["COPY"] for source in line.split()[:-1]}
    assert {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]} <= sources
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    includes = project["tool"]["setuptools"]["packages"]["find"]["include"]
    built = {package for package in packages if any(fnmatch(package, pattern) for pattern in includes)}
    assert built == {"model", "worker", "replay"} <= sources


@pytest.fixture
def server() -> Iterator[tuple[list[float], int]]:
    """The worker's own server: the time its loop goes by, which has turned at 0 for the last time, and its port."""
    now_s = [0.0]
    server = HttpServer(HttpSettings(port=0), Health(60.0, monotonic=lambda: now_s[0]), CollectorRegistry())
    yield now_s, server.port
    server.close()


def health_check(port: int) -> int:
    """The exit code of the Dockerfile's HEALTHCHECK."""
    line = instructions()["HEALTHCHECK"][0]
    command = json.loads(line[line.index("[") :])
    assert command[0] == "python"
    environment = {"FRESHET_HTTP__PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    return subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True, check=False).returncode


def test_the_health_check_tells_a_live_worker_from_a_stuck_and_an_absent_one(
    server: tuple[list[float], int],
) -> None:
    now_s, port = server
    assert health_check(port) == 0
    now_s[0] = 61.0
    assert health_check(port) == 1
    assert health_check(free_port()) == 1


# ---- .ci/run


def test_ci_runs_the_tests_with_the_kafka_beside_the_checkout(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / ".ci").mkdir(parents=True)
    script = checkout / ".ci" / "run"
    script.write_text((ROOT / ".ci" / "run").read_text())
    (checkout / "Makefile").write_text('test:\n\t@echo "kafka=$$KAFKA_HOME"\n')
    environment = {"PATH": "/usr/bin:/bin"}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script)], env=environment, cwd="/", capture_output=True, text=True, check=False
        )

    assert run().stdout == "kafka=\n"
    kafka = tmp_path / "shared" / "kafka"
    kafka.mkdir(parents=True)
    assert run().stdout == f"kafka={kafka}\n"
    (checkout / "Makefile").write_text("test:\n\t@exit 3\n")
    assert run().returncode != 0


def test_ci_is_executable() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


# ---- Kafka as it is set up there, for real

if broker_kind() == "kafka":

    class ComposeBroker(KafkaBroker):
        """Apache Kafka with the service's settings and no others, on this machine."""

        def __init__(self, data_dir: Path) -> None:
            super().__init__(data_dir)
            self.internal_port = free_port()

        def properties(self) -> dict[str, str]:
            service = compose(BASE)["services"]["kafka"]
            found = {n.removeprefix("KAFKA_").lower().replace("_", "."): v for n, v in service["environment"].items()}
            ports = {"9092": self.port, "9093": self._controller_port, "19092": self.internal_port}
            local = {name: on_this_machine(value, ports) for name, value in found.items()}
            return local | {"log.dirs": str(self.data_dir / "data")}

        def _format(self) -> None:
            # as the image does it: nothing but the cluster's id is added to the settings
            tool, settings = str(self.home / "bin" / "kafka-storage.sh"), str(self._properties_path)
            subprocess.run([tool, "format", "-t", "5L6g3nShT-eMCtK--X86sw", "-c", settings], check=True)

    def on_this_machine(value: str, ports: dict[str, int]) -> str:
        value = re.sub(
            r"\bkafka:", "127.0.0.1:", value.replace("://:", "://127.0.0.1:").replace("localhost", "127.0.0.1")
        )
        return re.sub(r":(\d{4,5})\b", lambda port: f":{ports[port[1]]}", value)

    @pytest.mark.integration
    @pytest.mark.slow
    def test_a_broker_with_these_settings_comes_up_is_healthy_and_has_the_topics(tmp_path: Path) -> None:
        services = compose(BASE)["services"]
        with ComposeBroker(tmp_path) as broker:

            def local(text: str) -> str:
                text = text.replace("/opt/kafka", str(broker.home)).replace("$$", "$")
                return text.replace("kafka:19092", f"127.0.0.1:{broker.internal_port}")

            script = local(services["topics"]["command"][0])
            subprocess.run([*services["topics"]["entrypoint"], script], check=True)
            check = [local(part) for part in services["kafka"]["healthcheck"]["test"][1:]]
            listed = subprocess.run(check, check=True, capture_output=True, text=True).stdout.split()
        assert sorted(listed) == ["clicks", "clicks.dead-letter"]
