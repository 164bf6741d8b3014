"""What callers and controllers tell each other of offsets beside a call: session reads.

Every answer to a write or a read quotes the offset it holds at. A read that sends such an offset
back may be answered by any controller that has applied the log up to there, and so sees at least
what the caller has seen. Without one a read is linearizable, and the leader's.
"""

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.rpc.status import Context

READ_AFTER_KEY = "streammeta-read-after"
"""Metadata of a read: an offset, decimal; the answer must hold everything below it."""

OFFSET_KEY = "streammeta-offset"
"""Trailing metadata of an answer: the offset it holds at, decimal."""

OFFSET_MAX = (1 << 63) - 1

_SHARE_OF_DEADLINE = 0.9
"""A caller that gives a deadline should hear why there is no answer, rather than nothing."""

_WAIT_MS_DEFAULT = 5_000
_WAIT_MS_MAX = 60_000


def read_after(context: Context) -> int | None:
    """Return the offset that a read asks for, None for a linearizable read.

    Raises:
        InvalidRequestError: it is no offset, or there are several.
    """
    metadata = context.invocation_metadata() or ()
    values = [value for key, value in metadata if key == READ_AFTER_KEY]
    if not values:
        return None
    text = str(values[0])
    if len(values) > 1:
        raise InvalidRequestError(READ_AFTER_KEY, f"given {len(values)} times; give it once")
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= OFFSET_MAX):
        raise InvalidRequestError(
            READ_AFTER_KEY,
            f"{text[:40]!r}; must be an offset, 0 to {OFFSET_MAX}, in decimal digits",
        )
    return int(text)


def longest_wait_ms(context: Context) -> int:
    """Return how long a session read may wait for its offset."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return _WAIT_MS_DEFAULT
    return min(_WAIT_MS_MAX, max(0, int(remaining_s * 1000 * _SHARE_OF_DEADLINE)))


def quote_offset(context: Context, offset: int) -> None:
    """Send the offset that the answer holds at."""
    context.set_trailing_metadata(((OFFSET_KEY, str(offset)),))
