"""Where a record keeps the fields of an event: at the top by their own names, or where the settings say."""

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec

FIELDS = ("user_id", "item_id", "event_type", "timestamp", "value", "event_id")

Step = str | int  # the name of a member of an object, or an index into an array

_PATH = re.compile(r"""\$(?:\.[^.\[\]'"\s]+|\['[^']+'\]|\[\d{1,9}\])+""")
_STEP = re.compile(r"""\.([^.\[\]'"\s]+)|\['([^']+)'\]|\[(\d+)\]""")

# Any JSON value but the two that Python cannot hold: a number out of range, or nesting that is too deep.
UNREADABLE: Final = object()

_LONGEST_ARRAY = 1000  # that is made up around a field

_any = msgspec.json.Decoder()
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])


class FieldMap:
    """Reads the six FIELDS from JSON objects; a field that is not there reads as None.

    A path is `$.a.b[0].c`; `['a.b']` stands for a name with dots. Everything off the paths is skipped: it has
    to be JSON, and nothing more. Raises ValueError at construction for an unknown field or a bad path.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        unknown = sorted(set(paths) - set(FIELDS))
        if unknown:
            raise ValueError(f"events.fields: unknown field {unknown[0]!r}; allowed: {', '.join(FIELDS)}")
        steps = [_parse(field, paths.get(field, f"$.{field}")) for field in FIELDS]
        tops = list(dict.fromkeys(path[0] for path in steps))
        self._paths = [(f"top{tops.index(path[0])}", path[1:]) for path in steps]
        self._steps = steps
        self._inner = {top for top, rest in self._paths if rest}
        names = {f"top{index}": str(top) for index, top in enumerate(tops)}
        types = {top: msgspec.Raw if top in self._inner else Any for top in names}
        self._row = _struct(names, types)
        self.read = msgspec.json.Decoder(self._row).decode
        self._read_raw = msgspec.json.Decoder(_struct(names, dict.fromkeys(names, msgspec.Raw))).decode

    def read_carefully(self, value: bytes) -> Any:
        """As `read`, but a field that cannot be held reads as UNREADABLE instead of raising.

        Raises msgspec.ValidationError when `value` is no object, msgspec.DecodeError when it is no JSON, and
        RecursionError when it is nested too deeply.
        """
        try:
            return self.read(value)
        except msgspec.ValidationError:
            raw = msgspec.structs.asdict(self._read_raw(value))
            return self._row(**{top: text if top in self._inner else _leaf(text) for top, text in raw.items()})

    def columns(self, rows: Sequence[Any]) -> list[list[Any]]:
        """What `read` returned, turned into one column for each of FIELDS."""
        columns = []
        for top, rest in self._paths:
            column = list(map(attrgetter(top), rows))
            columns.append([_follow(raw, rest) for raw in column] if top in self._inner else column)
        return columns

    def document(self, values: Mapping[str, object]) -> Any:
        """What reads back as `values`, a value for some of FIELDS. ValueError where their places exclude each other."""
        return _document([(self._steps[FIELDS.index(field)], value) for field, value in values.items()])

    def read_parsed(self, document: object) -> list[Any]:
        """The six fields of a document that another parser has read; None where it has them not."""
        return [_follow_parsed(document, path) for path in self._steps]


def _struct(names: Mapping[str, str], types: Mapping[str, Any]) -> type[msgspec.Struct]:
    fields = [(top, types[top], None) for top in names]
    return msgspec.defstruct("Row", fields, rename=names, gc=False)


def _parse(field: str, path: str) -> list[Step]:
    if not _PATH.fullmatch(path):
        raise ValueError(f"events.fields: {field}: {path!r} is no path; write it as $.a.b[0].c")
    steps = [int(index) if index else name or quoted for name, quoted, index in _STEP.findall(path)]
    if isinstance(steps[0], int):
        raise ValueError(f"events.fields: {field}: {path!r} begins with an index, but a record is an object")
    return steps


def _document(placed: Sequence[tuple[Sequence[Step], object]]) -> Any:
    if len(placed) == 1 and not placed[0][0]:
        return placed[0][1]
    inner: dict[Step, list[tuple[Sequence[Step], object]]] = {}
    for path, value in placed:
        if not path:
            raise ValueError("events.fields: the place of one field lies inside that of another")
        inner.setdefault(path[0], []).append((path[1:], value))
    parts = {step: _document(rest) for step, rest in inner.items()}
    indices = [step for step in parts if isinstance(step, int)]
    if not indices:
        return parts
    if len(indices) < len(parts) or max(indices) >= _LONGEST_ARRAY:
        raise ValueError("events.fields: no document has all of these places")
    return [parts.get(index) for index in range(max(indices) + 1)]


def _follow(raw: Any, steps: list[Step]) -> Any:
    if raw is None:
        return None
    try:
        for step in steps:
            decoder: Any = _object if isinstance(step, str) else _array
            raw = decoder.decode(raw)[step]
    except (msgspec.ValidationError, KeyError, IndexError):
        return None
    return _leaf(raw)


def _leaf(raw: Any) -> Any:
    try:
        return None if raw is None else _any.decode(raw)
    except (msgspec.ValidationError, RecursionError):
        return UNREADABLE


def _follow_parsed(document: Any, steps: Sequence[Any]) -> Any:
    for step in steps:
        if not isinstance(document, dict if isinstance(step, str) else list):
            return None
        try:
            document = document[step]
        except (KeyError, IndexError):
            return None
    return document
