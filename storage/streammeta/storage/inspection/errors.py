"""What can go wrong with a payload that is looked into; for objects see `storage.errors`."""

from __future__ import annotations

from streammeta.storage.errors import StorageError


class PayloadError(StorageError):
    """A payload is not what it was to be decoded as, or is damaged.

    `position` is the byte position in the payload, `found` and `expected` say what is wrong there.
    """

    def __init__(self, position: int, what: str, *, found: object, expected: object) -> None:
        self.position = position
        self.found = str(found)
        self.expected = str(expected)
        super().__init__(f"{what} at byte {position} is {found}, wanted {expected}")
