"""What a data set tells beside its events, a JSON object a line, before the events."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from replay.datasets.base import Table


def described(table: Table, *, whole: bool) -> Iterator[bytes]:
    """Users, items, and, where the `whole` data set follows, its own folds: numbers of their test events, from 0."""
    for user in table.people:
        yield _line("user", user_id=user.user_id, attributes=user.attributes)
    for item in table.items():
        yield _line("item", item_id=item.item_id, title=item.title, attributes=item.attributes)
    for name, test in table.folds.items() if whole else ():
        yield _line("fold", name=name, test=np.flatnonzero(test).tolist())


def _line(kind: str, **fields: Any) -> bytes:
    return json.dumps({"describes": kind} | fields, ensure_ascii=False).encode() + b"\n"
