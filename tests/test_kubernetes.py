"""The Kubernetes manifests, against Kubernetes' own schema and against the worker's settings."""

import re
import tomllib
from typing import Any

import jsonschema
import pytest

from tests.deployment import ROOT, read_yaml, schema, settings_of, validate
from tests.test_compose import image_environment, instructions
from worker.config_view import variables

FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in FOLDER.glob("*.yaml"))
SECRET_VARIABLES = {variable.env for variable in variables() if variable.secret}


def manifests() -> dict[str, Any]:
    """Every object, by kind."""
    found = [document for file in FILES for document in read_yaml(file)]
    assert len({document["kind"] for document in found}) == len(found), "one of each kind"
    return {document["kind"]: document for document in found}


def pod() -> Any:
    return manifests()["Deployment"]["spec"]["template"]["spec"]


def container() -> Any:
    (only,) = pod()["containers"]
    return only


def kind_schema(document: Any) -> Any:
    whole = schema("kubernetes")
    group = (
        document["apiVersion"].replace("/", ".") if "/" in document["apiVersion"] else f"core.{document['apiVersion']}"
    )
    name = f"io.k8s.api.{group}.{document['kind']}"
    assert name in whole["$defs"], name
    return whole | {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize("file", FILES)
def test_every_object_is_one_that_kubernetes_takes(file: str) -> None:
    for document in read_yaml(file):
        validate(document, kind_schema(document))
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])


@pytest.mark.parametrize(
    "path", [("spec", "strategi"), ("spec", "template", "spec", "containers", 0, "readynessProbe")]
)
def test_the_schema_finds_a_misspelt_field(path: tuple[str | int, ...]) -> None:
    broken = manifests()["Deployment"]
    parent = broken
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = {}
    with pytest.raises(jsonschema.ValidationError):
        validate(broken, kind_schema(broken))


def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    ours = {name: value for name, value in image_environment().items() if name.startswith("FRESHET_")}
    return settings_of(ours | manifests()["ConfigMap"]["data"], monkeypatch)


def test_every_entry_of_the_config_map_is_a_setting_with_an_allowed_value(monkeypatch: pytest.MonkeyPatch) -> None:
    data = manifests()["ConfigMap"]["data"]
    assert all(isinstance(value, str) for value in data.values())
    settings(monkeypatch)
    assert not SECRET_VARIABLES & data.keys(), "secrets do not belong into a config map"


def test_the_variables_come_from_the_config_map_and_a_secret_that_is_in_no_file() -> None:
    sources = container()["envFrom"]
    assert sources[0] == {"configMapRef": {"name": manifests()["ConfigMap"]["metadata"]["name"]}}
    secret = sources[1]["secretRef"]["name"]
    assert "Secret" not in manifests()
    for page in ("deploy/kubernetes/deployment.yaml", "docs/operations.md"):
        told = re.findall(
            rf"kubectl create secret generic {secret} .*?--from-literal=(FRESHET_\w+)=", (ROOT / page).read_text()
        )
        assert told, f"{page} says how the secret is made"
        assert set(told) <= SECRET_VARIABLES


def test_there_is_one_worker_and_the_old_one_is_gone_before_the_new_one_starts() -> None:
    spec = manifests()["Deployment"]["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()


def test_the_worker_has_more_time_to_stop_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pod()["terminationGracePeriodSeconds"] > settings(monkeypatch).runtime.grace_s + 10


def test_probes_and_prometheus_find_the_port_that_the_worker_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    http = settings(monkeypatch).http
    assert http.host == "0.0.0.0"
    assert container()["ports"] == [{"name": "http", "containerPort": http.port}]
    annotations = manifests()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(http.port),
        "prometheus.io/path": "/metrics",
    }
    paths = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    for name, path in paths.items():
        assert container()[name]["httpGet"] == {"path": path, "port": "http"}
    assert instructions()["EXPOSE"] == [str(http.port)]


def test_a_slow_start_is_not_taken_for_a_dead_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = container()["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 300
    probe = container()["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= settings(monkeypatch).http.stale_after_s


def test_checkpoints_are_on_the_claim_and_nothing_else_but_tmp_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod()["volumes"]}
    assert volumes == {
        "state": {"persistentVolumeClaim": {"claimName": manifests()["PersistentVolumeClaim"]["metadata"]["name"]}},
        "tmp": {"emptyDir": {}},
    }
    assert settings(monkeypatch).checkpoint.dir.is_relative_to(mounts["state"])
    assert image_environment()["NUMBA_CACHE_DIR"].startswith(f"{mounts['tmp']}/")
    assert manifests()["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_pod_has_no_rights_that_it_does_not_need() -> None:
    assert pod()["automountServiceAccountToken"] is False
    assert pod()["enableServiceLinks"] is False
    user, _, group = instructions()["USER"][0].partition(":")
    assert pod()["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": int(user),
        "runAsGroup": int(group),
        "fsGroup": int(group),
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_resources_are_asked_for_and_limited() -> None:
    resources = container()["resources"]
    assert resources["requests"].keys() == resources["limits"].keys() == {"cpu", "memory"}


def test_the_image_is_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert container()["image"] == f"freshet:{version}"
