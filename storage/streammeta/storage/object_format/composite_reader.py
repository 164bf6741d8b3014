"""Reading a composite object without doing any I/O, when the size of its file is known.

Like `ObjectReader` it says which bytes it needs. What metadata records for a composite is the size
of the linked blocks, not of the file, so the size comes from the store; without it the file has to
be read whole and given to `decode_composite`. The footer is checked before anything else is asked
for: what is no composite, however large, costs one small range.
"""

from __future__ import annotations

from streammeta.storage.object_format.composite import CompositeObject, decode_composite
from streammeta.storage.object_format.deviation import Deviation
from streammeta.storage.object_format.footer import decode_footer
from streammeta.storage.object_format.object_reader import ByteRange, exactly, tail_guess


class CompositeReader:
    """Parses the composite object named `source` (for messages), a file of `file_size` bytes.

    While `needed` is a range, fetch it and pass it to `receive`; then `composite` is known. The
    first range is the guess that `ObjectReader` makes, the second what is in front of it. Raises
    `CorruptObjectError` when the size is too small for an object. Strict, unless `noted` is given:
    then deviations (see `deviation`) are added to it and passed over.
    """

    def __init__(self, source: str, file_size: int, noted: list[Deviation] | None = None) -> None:
        self._source = source
        self._noted = noted
        self._size = file_size
        self._needed: ByteRange | None = tail_guess(file_size, source)
        self._tail = b""
        self._composite: CompositeObject | None = None

    @property
    def needed(self) -> ByteRange | None:
        """The bytes to fetch next, or None when the composite is known."""
        return self._needed

    @property
    def composite(self) -> CompositeObject:
        """The links and their index. Raises `RuntimeError` while bytes are still needed."""
        if self._composite is None:
            raise RuntimeError(f"{self._source} is not read yet: receive {self._needed}")
        return self._composite

    def receive(self, data: bytes | memoryview) -> None:
        """Take the bytes of the range in `needed`.

        Raises `CorruptObjectError` when they are fewer or more than asked for or break the format;
        the reader then stays as it was.
        """
        if self._needed is None:
            raise RuntimeError(f"{self._source} is known already, no bytes are needed")
        view = exactly(self._needed, data, self._source)
        if not self._tail:
            # Deviations are noted when the whole file is read.
            seen_again: list[Deviation] | None = None if self._noted is None else []
            decode_footer(view, self._size, composite=True, source=self._source, noted=seen_again)
        if self._needed.start > 0:
            self._tail = bytes(view)
            self._needed = ByteRange(0, self._needed.start)
            return
        self._composite = decode_composite(
            b"".join((view, self._tail)), source=self._source, noted=self._noted
        )
        self._needed, self._tail = None, b""
