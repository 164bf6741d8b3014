"""Checks of single fields of requests, for whoever checks whole requests.

Each raises naming the field as in `proto/`, what was got and what was wanted.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from streammeta.controller.errors import InvalidRequestError, LimitExceededError
from streammeta.controller.metadata.values import NodeIdentity

BATCH_MAX = 10_000
"""Items in one request."""
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def fail(field: str, got: object, wanted: str) -> InvalidRequestError:
    """Return the error that says so."""
    return InvalidRequestError(field, f"got {got}, must be {wanted}")


def check_between(field: str, value: int, low: int, high: int) -> None:
    """Raise unless a number is in `[low, high]`."""
    if not low <= value <= high:
        raise fail(field, value, f"{low} to {high}")


def check_batch(field: str, items: Sequence[object]) -> None:
    """Raise if there is nothing, or more than one request may hold."""
    if not items:
        raise fail(field, "none", f"1 to {BATCH_MAX}")
    if len(items) > BATCH_MAX:
        raise LimitExceededError(f"{field}: got {len(items)}, at most {BATCH_MAX} in one request")


def check_no_repeat(field: str, values: Sequence[object]) -> None:
    """Raise if a value is there twice."""
    if len(set(values)) != len(values):
        twice, _ = Counter(values).most_common(1)[0]
        raise InvalidRequestError(field, f"{twice} appears twice, must appear once")


def check_node(node: NodeIdentity) -> None:
    """Raise unless node id and epoch are in range."""
    check_between("node.node_id", node.node_id, 0, INT32_MAX)
    check_between("node.node_epoch", node.node_epoch, 0, INT64_MAX)


def raise_at(field: str, bad: np.ndarray, first_row: int, wanted: str) -> None:
    """Raise for the first bad row; `first_row` is the number of the row that `bad` begins with."""
    if np.count_nonzero(bad):
        row = int(np.argmax(bad)) + first_row
        raise InvalidRequestError(f"{field}[{row}]", f"must be {wanted}")
