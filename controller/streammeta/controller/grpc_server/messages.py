"""Messages of gRPC in the bytes of a stream: torn or several at once, none longer than may be.

Does no I/O.
"""

from __future__ import annotations

PREFIX_BYTES = 5
"""A byte that says whether the message is compressed, and its length, before each message."""

MESSAGES_A_UNIT = 8
"""Messages of one frame that are as much work as a frame."""


class MessageTooLargeError(Exception):
    """A message is announced that is longer than may be."""


class CompressedMessageError(Exception):
    """A message is compressed, which is not offered."""


class UnknownFlagsError(Exception):
    """A message begins with flags that gRPC does not have."""


_COMPRESSED = 1
"""The one flag of a message."""


def framed(message: bytes) -> bytes:
    """Return a message as it is sent."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class MessageReader:
    """Takes the bytes of one stream, gives its messages."""

    __slots__ = ("_buffer", "_bytes_max", "needs")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()
        self.needs = 0
        """Missing bytes of the current message, 0 while its length is unknown."""

    @property
    def held(self) -> int:
        """Bytes of a message that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the messages that they complete.

        Raises:
            MessageTooLargeError: from its length, before its bytes are kept.
            CompressedMessageError: a message is compressed.
            UnknownFlagsError: a message has other flags.
        """
        buffer = self._buffer
        # Nearly every message arrives as one frame, and is then copied only once.
        if not buffer and len(data) >= PREFIX_BYTES:
            end = PREFIX_BYTES + self._length(data, 0)
            if len(data) == end:
                return [data[PREFIX_BYTES:]]

        buffer += data
        found: list[bytes] = []
        at, self.needs = 0, 0
        while len(buffer) - at >= PREFIX_BYTES:
            end = at + PREFIX_BYTES + self._length(buffer, at)
            if len(buffer) < end:
                self.needs = end - len(buffer)
                break
            found.append(bytes(buffer[at + PREFIX_BYTES : end]))
            at = end

        # One deletion for all messages, because each moves the rest of the buffer.
        if at:
            del buffer[:at]

        return found

    def _length(self, data: bytes | bytearray, at: int) -> int:
        flags = data[at]
        if flags == _COMPRESSED:
            raise CompressedMessageError("a message is compressed")
        if flags:
            raise UnknownFlagsError(f"a message begins with the unknown flags {flags:#x}")
        length = int.from_bytes(data[at + 1 : at + PREFIX_BYTES], "big")
        # Before the bytes arrive, so that a wrong length reserves no memory.
        if length > self._bytes_max:
            raise MessageTooLargeError(
                f"a message of {length} bytes; at most {self._bytes_max} are taken"
            )
        return length
