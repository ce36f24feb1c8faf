"""Settings as people meet them: loaded with one clear error a mistake, listed, and as a table for the README."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import annotated_types
from dotenv.parser import parse_stream
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python

from worker.redact import MASK, mask_url
from worker.settings import ENV_PREFIX, Settings, SettingsError

ENV_FILE_VARIABLE = f"{ENV_PREFIX}ENV_FILE"
# What Kubernetes puts into every pod beside a service whose name begins with "freshet".
_SERVICE_LINK = re.compile(
    rf"{ENV_PREFIX}(\w+_)?SERVICE_(HOST|PORT(_\w+)?)|{ENV_PREFIX}(\w+_)?PORT_\d+_(TCP|UDP|SCTP)\w*"
)
_SERVICE_PORT = re.compile(rf"{ENV_PREFIX}(\w+_)?PORT")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True)
class Variable:
    """One setting: the variable FRESHET_<SECTION>__<NAME>."""

    section: str
    name: str
    field: FieldInfo

    @property
    def env(self) -> str:
        return f"{ENV_PREFIX}{self.section}__{self.name}".upper()

    @property
    def secret(self) -> bool:
        return self.field.annotation is SecretStr

    @property
    def help(self) -> str:
        return self.field.description or ""

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)


@dataclass(frozen=True, slots=True)
class Line:
    """One effective setting, for people: secrets are masked."""

    env: str
    value: str
    source: str  # default, environment or the env file's path
    help: str

    def __str__(self) -> str:
        return f"{self.env}={self.value}  [{self.source}]  {self.help}"


@cache
def sections() -> Mapping[str, type[BaseModel]]:
    """The sections of the settings, by name, in their order."""
    found = {name: field.annotation for name, field in Settings.model_fields.items()}
    return MappingProxyType({name: kind for name, kind in found.items() if isinstance(kind, type)})


@cache
def variables() -> tuple[Variable, ...]:
    """Every setting, in order."""
    return tuple(
        Variable(section, name, field)
        for section, kind in sections().items()
        for name, field in kind.model_fields.items()
    )


# ---- loading


def load_settings(env_file: Path | None = None) -> Settings:
    """The settings of the environment and of `env_file` (else FRESHET_ENV_FILE's); the environment goes first.

    Raises SettingsError with one line for each mistake: the variable and what is allowed, never a secret.
    """
    path = env_file_path(env_file)
    in_file = _read_env_file(path) if path else {}
    problems = [*_unknown(os.environ, "the environment"), *_unknown(in_file, str(path))]
    problems += _not_json({**in_file, **_ours(os.environ)})
    if problems:
        raise SettingsError(problems)
    try:
        return Settings(_env_file=path)
    except ValidationError as error:
        problems = [_explain(details) for details in error.errors(include_url=False)]
    raise SettingsError(problems)  # outside of `except`: pydantic's own error shows what was given


def env_file_path(env_file: Path | None) -> Path | None:
    """`env_file`, else the file that FRESHET_ENV_FILE names, if any."""
    named = os.environ.get(ENV_FILE_VARIABLE, "")
    return env_file or (Path(named) if named else None)


def _read_env_file(path: Path) -> dict[str, str]:
    """The file's own settings, by upper-case name."""
    try:
        with path.open(encoding="utf-8") as file:
            bindings = list(parse_stream(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingsError([f"the env file {path} cannot be read: {reason}"]) from None
    wrong = [binding.original.line for binding in bindings if binding.error]
    if wrong:
        raise SettingsError([f"the env file {path}, line {line}: not NAME=value" for line in wrong])
    return _ours({binding.key: binding.value or "" for binding in bindings if binding.key})


def _ours(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name.upper(): value for name, value in environment.items()}
    return {name: value for name, value in found.items() if name.startswith(ENV_PREFIX)}


def _unknown(environment: Mapping[str, str], where: str) -> Iterator[str]:
    for name, value in _ours(environment).items():
        if not (_known(name) or _is_service_link(name, value)):
            yield f"{name} (in {where}): no such setting{_suggestion(name)}"


def _known(name: str) -> bool:
    if name == ENV_FILE_VARIABLE or name in {f"{ENV_PREFIX}{section}".upper() for section in sections()}:
        return True
    return any(name == v.env or (_is_json(v.field) and name.startswith(f"{v.env}__")) for v in variables())


def _is_service_link(name: str, value: str) -> bool:
    if _SERVICE_LINK.fullmatch(name):
        return True
    return bool(_SERVICE_PORT.fullmatch(name) and _SERVICE_URL.match(value))


def _suggestion(name: str) -> str:
    near = get_close_matches(name, [*(variable.env for variable in variables()), ENV_FILE_VARIABLE], n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else "; `python -m worker config` lists all"


def _is_json(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict


def _not_json(environment: Mapping[str, str]) -> Iterator[str]:
    structured = {variable.env: variable for variable in variables() if _is_json(variable.field)}
    whole = {f"{ENV_PREFIX}{section}".upper() for section in sections()}
    for name, value in environment.items():
        if name in structured or name in whole:
            try:
                right = isinstance(json.loads(value), dict)
            except ValueError:
                right = False
            if not right:
                yield f"{name}: a JSON object is allowed" + (f"; {structured[name].help}" if name in structured else "")


def setting_problems(section: str, error: ValidationError) -> list[str]:
    """One line for each mistake in a section that was validated on its own."""
    found = error.errors(include_url=False)
    return [_explain(ErrorDetails(**{**details, "loc": (section, *details["loc"])})) for details in found]


def _explain(details: ErrorDetails) -> str:
    """One line for one of pydantic's errors; shows the value only of a plain setting that is no secret."""
    where = [str(part) for part in details["loc"]]
    env = f"{ENV_PREFIX}{'__'.join(where[:2])}".upper()
    variable = next((variable for variable in variables() if variable.env == env), None)
    message = details["msg"].removeprefix("Value error, ")
    if variable is None:
        unknown = details["type"] == "extra_forbidden"
        return f"{env}: no such setting{_suggestion(env)}" if unknown else f"{env}: {message}"
    inside = f" at {'.'.join(where[2:])}" if where[2:] else ""
    plain = isinstance(details["input"], str | int | float) and not variable.secret
    given = f"={mask_url(str(details['input']))[:80]}" if plain else ""
    if details["type"] != "value_error":  # a validator of ours has said what is allowed
        message += f"; allowed: {allowed(variable.field)}"
    return f"{env}{inside}{given}: {message} ({variable.help})"


# ---- what is allowed


def allowed(field: FieldInfo) -> str:
    """The values that a setting takes, in words."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return " | ".join(str(choice) or "(empty)" for choice in get_args(kind))
    if kind is bool:
        return "true | false"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _range(field.metadata)
    if get_origin(kind) is tuple:
        return "names separated by commas"
    return "a JSON object" if _is_json(field) else "text"


def _range(metadata: list[Any]) -> str:
    words = {
        annotated_types.Ge: ("ge", "from"),
        annotated_types.Gt: ("gt", "above"),
        annotated_types.Le: ("le", "to"),
        annotated_types.Lt: ("lt", "below"),
    }
    limits = [(words[type(limit)], limit) for limit in metadata if type(limit) in words]
    return "".join(f" {word} {getattr(limit, attribute)}" for (attribute, word), limit in limits)


# ---- showing


def config_lines(settings: Settings, env_file: Path | None = None) -> list[Line]:
    """Every setting as it is in effect, and where its value comes from."""
    path = env_file_path(env_file)
    in_file = _read_env_file(path) if path else {}
    places = [("environment", _ours(os.environ)), (str(path), in_file)]
    return [_line(variable, settings, places) for variable in variables()]


def _line(variable: Variable, settings: Settings, places: list[tuple[str, dict[str, str]]]) -> Line:
    value = getattr(getattr(settings, variable.section), variable.name)
    source = next((place for place, environment in places if _sets(environment, variable)), "default")
    return Line(variable.env, show(value), source, variable.help)


def _sets(environment: Mapping[str, str], variable: Variable) -> bool:
    inside = f"{variable.env}__"
    if any(name == variable.env or name.startswith(inside) for name in environment):
        return True
    whole = environment.get(f"{ENV_PREFIX}{variable.section}".upper())
    return whole is not None and variable.name in json.loads(whole)


def show(value: object) -> str:
    """A setting's value as it would be written in the environment, secrets masked."""
    if isinstance(value, SecretStr):
        secret = value.get_secret_value()
        return mask_url(secret) if "://" in secret else MASK if secret else ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(to_jsonable_python(value), ensure_ascii=False)
    return str(value)


def settings_table_markdown() -> str:
    """The README's table of settings."""
    return "\n\n".join(_section_markdown(name, kind) for name, kind in sections().items()) + "\n"


def _section_markdown(section: str, kind: type[BaseModel]) -> str:
    title = (kind.__doc__ or "").strip().splitlines()[0]
    rows = [
        f"| `{v.env}` | {_code(show(v.default))} | {_cell(allowed(v.field))} | {_cell(v.help)} |"
        for v in variables()
        if v.section == section
    ]
    head = ["| Variable | Default | Allowed | What it is |", "|---|---|---|---|"]
    return "\n".join([f"**{section}**: {title}", "", *head, *rows])


def _code(text: str) -> str:
    return "`{}`".format(text.replace("|", "\\|")) if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
