"""Deviations: bytes that break the format, and that AutoMQ's own reader passes over.

Objects of other writers may have a few of them and still hold every record. Readers of this package
are strict unless they are given a list to note deviations in; then those of the kinds below are
noted and passed over, and everything else stays an error:

- a data block flag other than 0x02, and reserved footer bytes that are not zero;
- a gap in the offsets between two records under one index entry;
- a data block without records, and a composite object without links.
"""

from __future__ import annotations

from dataclasses import dataclass

from streammeta.storage.errors import CorruptObjectError


@dataclass(frozen=True, slots=True)
class Deviation:
    """One deviation: its byte position in the object, what is there and what the format wants."""

    position: int
    what: str
    found: str
    expected: str

    @property
    def problem(self) -> str:
        """Found and wanted, in one sentence."""
        return f"{self.what} is {self.found}, wanted {self.expected}"


def deviate(
    noted: list[Deviation] | None,
    source: str,
    position: int,
    what: str,
    *,
    found: object,
    expected: object,
) -> None:
    """Note a deviation of the object named `source`, or refuse it when `noted` is None.

    Raises `CorruptObjectError` with the same content.
    """
    if noted is None:
        raise CorruptObjectError(source, position, what, found=found, expected=expected)
    noted.append(Deviation(position, what, str(found), str(expected)))
