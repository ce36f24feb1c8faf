"""Settings side by side: which rows of the worker's own there are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from model.config import ModelConfig
from model.families import FAMILIES
from worker.config_view import sections, setting_problems
from worker.settings import EvaluationSettings, EventSettings, Settings, SettingsError

Changes = dict[str, str]  # "section.name" → value, as text


@dataclass(frozen=True, slots=True)
class Variant:
    """One row: a name, and settings that are whole."""

    name: str
    settings: Settings

    @property
    def default(self) -> bool:
        """Whether these are the settings that Freshet is shipped with, in all that shapes the model."""
        shipped = (ModelConfig(), EventSettings(), EvaluationSettings().share)
        return (self.settings.model, self.settings.events, self.settings.evaluation.share) == shipped


def parse_changes(text: str, option: str) -> Changes:
    """`model.replay=1,dim=32` as changes; a name without its section is the model's. Raises SettingsError."""
    changes: Changes = {}
    for pair in text.split(","):
        key, is_pair, value = (part.strip() for part in pair.partition("="))
        if not (key and is_pair):
            raise SettingsError([f"{option} {text}: {pair!r} is no NAME=VALUE, such as model.replay=1"])
        changes[key if "." in key else f"model.{key}"] = value
    return changes


def parse_variant(text: str) -> tuple[str, Changes]:
    """`small:dim=32,replay=1` as a name and its changes. Raises SettingsError."""
    name, is_named, changes = text.partition(":")
    if not (is_named and name.strip() and changes.strip()):
        raise SettingsError([f"--variant {text}: give NAME:SETTING=VALUE,…, such as small:model.dim=32"])
    return name.strip(), parse_changes(changes, "--variant")


def changed(settings: Settings, changes: Changes, option: str) -> Settings:
    """`settings` with changes, checked as those of the environment are. Raises SettingsError."""
    by_section: dict[str, Changes] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        by_section.setdefault(section, {})[name] = value
    update = {section: _section(settings, section, values, option) for section, values in by_section.items()}
    return settings.model_copy(update=update)


def _section(settings: Settings, section: str, values: Changes, option: str) -> Any:
    kind = sections().get(section)
    if kind is None:
        raise SettingsError([f"{option}: there is no section {section!r}; there are {', '.join(sections())}"])
    try:
        return kind.model_validate({**getattr(settings, section).model_dump(), **values})
    except ValidationError as error:
        problems = setting_problems(section, error)
    raise SettingsError([f"{option}: {problem}" for problem in problems])


def variants(
    base: Settings, families: Sequence[str], changes: Sequence[Changes], named: Sequence[tuple[str, Changes]]
) -> list[Variant]:
    """A row for each family with the common changes, then one for each named variant of the first family."""
    unknown = [family for family in families if family not in FAMILIES]
    if unknown:
        raise SettingsError([f"--family {unknown[0]}: there is no such family; there are {', '.join(FAMILIES)}"])
    for change in changes:
        base = changed(base, change, "--set")
    rows = [Variant(family, changed(base, {"model.family": family}, "--family")) for family in families]
    first = rows or [Variant(base.model.family, base)]
    return first + [Variant(name, changed(first[0].settings, change, "--variant")) for name, change in named]


def with_seeds(rows: Sequence[Variant], seeds: Sequence[int]) -> list[Variant]:
    """Each row once for each seed; as it is without any."""
    if not seeds:
        return list(rows)
    return [
        Variant(row.name, changed(row.settings, {"model.seed": str(seed)}, "--seeds")) for row in rows for seed in seeds
    ]
