"""Request that is encoded once, with holes that are filled for every commit.

Python needs milliseconds to put together a request of a thousand ranges and microseconds to fill
its holes, so the client does not limit the measurement.
"""

import random
from collections.abc import Callable

import numpy as np


class Template:
    """Encoded request with holes. A name may stand for many holes of one size, with equal bytes."""

    def __init__(self, encode: Callable[..., bytes], **sizes: int) -> None:
        """Encode a request with holes of these sizes in bytes, by name.

        `encode` is called with random bytes for each hole, by which the holes are found. It has to
        copy them, and the layout must not depend on their values.
        """
        rng = random.Random(1)
        marks = {name: rng.randbytes(size) for name, size in sizes.items()}
        encoded = encode(**marks)
        self._buffer = np.frombuffer(encoded, dtype=np.uint8).copy()
        self._places = {
            name: np.array(_find_all(encoded, mark))[:, None] + np.arange(len(mark))
            for name, mark in marks.items()
        }

    def fill(self, **values: bytes) -> bytes:
        """Return the request with the named holes filled. The others keep their last bytes."""
        for name, value in values.items():
            self._buffer[self._places[name]] = np.frombuffer(value, dtype=np.uint8)
        return self._buffer.tobytes()


def _find_all(encoded: bytes, mark: bytes) -> list[int]:
    places: list[int] = []
    at = encoded.find(mark)
    while at >= 0:
        places.append(at)
        at = encoded.find(mark, at + len(mark))
    return places
