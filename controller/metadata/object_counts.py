"""How many objects there are of each state, kept by replay so that nobody has to scan for it."""

import numpy as np
import numpy.typing as npt

from controller.metadata.values import Int64Column, ObjectState

_STATES = len(ObjectState)
_COMMITTED = int(ObjectState.COMMITTED)


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

    def add(self, states: npt.NDArray[np.integer], sizes: Int64Column, sign: int) -> None:
        """Add (sign 1) or take away (-1) objects given by their states and sizes."""
        for state, count in enumerate(np.bincount(states, minlength=_STATES).tolist()):
            self._of_state[state] += sign * count
        self.committed_bytes += sign * int(sizes[states == _COMMITTED].sum())
