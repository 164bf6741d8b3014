"""Pages of listings in id order. A page token is the id the page begins at or after."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streammeta.controller.metadata.values import Int64Column, PageRequest

PAGE_SIZE_DEFAULT = 1_000
_CHUNK_ROWS = 65_536

RowFilter: TypeAlias = Callable[[slice], npt.NDArray[np.bool_]]


def page_size(page: PageRequest) -> int:
    """Return how many items the page may hold."""
    return page.page_size or PAGE_SIZE_DEFAULT


def first_id(page: PageRequest) -> int:
    """Return the id the page begins at or after."""
    return int(page.page_token) if page.page_token else 0


def token_of(next_id: int) -> str:
    """Return the token of the page that begins at an id; -1: there is no more."""
    return str(next_id) if next_id >= 0 else ""


def page_of_rows(
    first_row: int, rows: int, size: int, wanted: RowFilter
) -> tuple[Int64Column, int]:
    """Return the first `size` wanted rows from `first_row` on, and where the next page begins.

    The latter is -1 on the last page. Looks at `rows` rows in chunks, and at no more than needed.
    """
    found = [np.zeros(0, dtype=np.int64)]
    count = 0
    for start in range(first_row, rows, _CHUNK_ROWS):
        chunk = slice(start, min(start + _CHUNK_ROWS, rows))
        hits = np.flatnonzero(wanted(chunk)) + start
        found.append(hits)
        count += len(hits)
        if count > size:
            every = np.concatenate(found)
            return every[:size], int(every[size])
    return np.concatenate(found), -1


def page_of_ids(ids: Sequence[int], page: PageRequest) -> tuple[list[int], str]:
    """Return the page's part of ids asked for by name, in id order, and the next token."""
    ordered = sorted(set(ids))
    rest = [item for item in ordered if item >= first_id(page)]
    size = page_size(page)
    return rest[:size], token_of(rest[size] if len(rest) > size else -1)
