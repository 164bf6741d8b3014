"""How many objects there are of each state, kept by replay so that nobody has to scan for it."""

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import LimitExceededError
from streammeta.controller.metadata.values import Int64Column, ObjectState

COMMITTED_BYTES_MAX = 1 << 62
"""Bytes that all committed objects may have together; their sum fits into 64 bits."""
_STATES = len(ObjectState)
_COMMITTED = int(ObjectState.COMMITTED)
_LOW = 31
_LOW_BITS = (1 << _LOW) - 1


class ObjectCounts:
    """Objects by `ObjectState`, and how many bytes the committed ones take."""

    def __init__(self) -> None:
        self._of_state = [0] * _STATES
        self.committed_bytes = 0

    def of(self, state: ObjectState) -> int:
        """Return how many objects are in a state."""
        return self._of_state[state]

    def present(self) -> int:
        """Return how many objects there are."""
        return sum(self._of_state)

    def change(self, state: int, count: int, size: int = 0) -> None:
        """Add `count` objects in a state, of `size` bytes together; both may be negative."""
        self._of_state[state] += count
        if state == _COMMITTED:
            self.committed_bytes += size

    def require_room(self, object_size: int, others: Int64Column) -> None:
        """Raise `LimitExceededError` if with objects of these sizes the sum of all is too large."""
        more = object_size + (exact_sum(others) if len(others) else 0)
        if self.committed_bytes + more > COMMITTED_BYTES_MAX:
            raise LimitExceededError(
                f"object_size: {more} bytes are too many; committed objects have "
                f"{self.committed_bytes} together, {COMMITTED_BYTES_MAX} is the limit"
            )

    def add(self, states: npt.NDArray[np.integer], sizes: Int64Column, sign: int) -> None:
        """Add (sign 1) or take away (-1) objects given by their states and sizes."""
        for state, count in enumerate(np.bincount(states, minlength=_STATES).tolist()):
            self._of_state[state] += sign * count
        self.committed_bytes += sign * exact_sum(sizes[states == _COMMITTED])


def exact_sum(sizes: Int64Column) -> int:
    """Return the sum of sizes that are not negative, however large they are."""
    low = int((sizes & _LOW_BITS).sum())
    return (int((sizes >> _LOW).sum()) << _LOW) + low
