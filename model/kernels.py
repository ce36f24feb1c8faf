"""Compiled loops over plain arrays."""

from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import numba
import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., object])
Rows = NDArray[np.int32]


def _compiled(function: F, **options: Any) -> F:
    try:
        return cast(F, numba.njit(nogil=True, cache=True, **options)(function))
    except RuntimeError:  # no folder to cache in (a read-only container): compile at each start
        return cast(F, numba.njit(nogil=True, **options)(function))


@overload
def kernel(function: F) -> F: ...


@overload
def kernel(*, fastmath: bool) -> Callable[[F], F]: ...


def kernel(function: F | None = None, *, fastmath: bool = False) -> F | Callable[[F], F]:
    """Compile a function without the interpreter lock, and keep the machine code where that can be written.

    fastmath: sums may be taken in another order, which lets the processor take several terms at once.
    """
    if function is not None:
        return _compiled(function)
    return lambda compiled: _compiled(compiled, fastmath=fastmath)


@kernel
def compact(rows: Rows, stamp: Rows, unique: Rows, local: Rows) -> int:
    """Number the distinct rows in order of appearance; the return value is how many there are.

    rows (n,): table rows. stamp (table rows,): all -1, and all -1 again afterwards. unique (≥ distinct,):
    receives each distinct row once. local (n,): receives for each entry of `rows` its index in `unique`.
    """
    count = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        if stamp[row] < 0:
            stamp[row] = count
            unique[count] = row
            count += 1
        local[i] = stamp[row]
    for i in range(count):
        stamp[unique[i]] = -1
    return count


def compacted(rows: Rows, table_rows: int) -> tuple[Rows, Rows]:
    """The distinct `rows` (m,) and, for each entry, its index among them, shaped like `rows`."""
    flat = np.ascontiguousarray(rows, dtype=np.int32).reshape(-1)
    unique, local = np.empty(flat.size, np.int32), np.empty(flat.size, np.int32)
    count = compact(flat, np.full(table_rows, -1, np.int32), unique, local)
    return unique[:count], local.reshape(rows.shape)
