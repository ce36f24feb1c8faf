"""What the tests of the deployment files share."""

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from worker.config_view import load_settings
from worker.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parent.parent
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_yaml(name: str) -> list[Any]:
    """The documents of a YAML file of the repository."""
    return list(yaml.safe_load_all((ROOT / name).read_text()))


@cache
def schema(name: str) -> Any:
    """A schema of tests/data, with its own correctness checked; not to be changed."""
    loaded = json.loads((ROOT / "tests" / "data" / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(loaded)
    return loaded


def validate(document: Any, against: Any) -> None:
    """Raises jsonschema.ValidationError where `document` does not follow a schema that is right itself."""
    jsonschema.Draft202012Validator(against).validate(document)


def settings_of(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The worker's settings in an environment that has these variables and no others of ours.

    Raises SettingsError for a variable that is no setting and for a value that is not allowed.
    """
    for name in [name for name in os.environ if name.upper().startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return load_settings()


def seconds(duration: str) -> float:
    """A duration as Docker writes it: 45s, 1m30s."""
    parts = re.findall(r"(\d+)(ms|s|m|h)", duration)
    assert "".join(n + unit for n, unit in parts) == duration, duration
    return sum(int(n) * _SECONDS[unit] for n, unit in parts)
