"""State machine of one gRPC call: bytes and events in, messages, windows and headers out.

No event loop, clock or connection is used here. `call` feeds the events and carries out the
results. Methods return plain values, because every RPC passes through here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import grpc

from streammeta.controller.grpc_server import headers
from streammeta.controller.grpc_server.limits import Limits
from streammeta.controller.grpc_server.messages import (
    PREFIX_BYTES,
    CompressedMessageError,
    MessageReader,
    MessageTooLargeError,
    UnknownFlagsError,
)
from streammeta.controller.grpc_server.refusals import over_limit

# Each look-up in the enum costs as much as a call.
OK = grpc.StatusCode.OK


class CallRefusedError(Exception):
    """The request breaks a rule. The arguments are the code, details and trailers of the status."""


@dataclass(slots=True, eq=False)
class CallCore:
    """Request, window and status of one call.

    Invariants, after every event:

    - The handler receives each message once, in order. It begins at most once, and a call of one
      request begins only with exactly one complete request.
    - `held` is the size of the kept bytes of the request when `count_held` was called last. It is
      0 after `release`, which the beginning of a call of one request and every end include.
    - The client may have sent at most `lookahead_bytes` more than the handler has taken, or the
      one message that the handler waits for.
    - The headers go out at most once and before everything else, the status at most once.
      Nothing follows the status, or the end of the stream.
    """

    _limits: Limits
    _encoding: str
    """Compression that the client announced, for the message that uses it."""
    _request_streaming: bool
    _reader: MessageReader = field(init=False)
    _kept: int = field(init=False, default=0)
    _consumed: int = field(init=False, default=0)
    _granted: int = field(init=False)
    _has_head: bool = field(init=False, default=False)
    held: int = field(init=False, default=0)
    is_begun: bool = field(init=False, default=False)
    messages: deque[bytes] = field(init=False, default_factory=deque)
    """Complete messages that the handler has not taken."""
    has_status: bool = field(init=False, default=False)
    """Whether the status is sent, or the call ended without one."""
    is_over: bool = field(init=False, default=False)
    """Whether the stream is closed in both directions."""
    has_ended: bool = field(init=False, default=False)
    """Whether nothing more may be sent: it has the status, or is over."""
    is_given_up: bool = field(init=False, default=False)
    """Whether the client ended the call before its status."""
    code: grpc.StatusCode = field(init=False, default=OK)
    details: str = field(init=False, default="")
    trailing: headers.Metadata = field(init=False, default=())

    def __post_init__(self) -> None:
        self._reader = MessageReader(self._limits.request_bytes)
        self._granted = self._limits.lookahead_bytes

    # -- the request

    def receive(self, data: bytes) -> int:
        """Read bytes of the request. Return the number of messages that they complete.

        Raises:
            CallRefusedError: a message is too large, compressed, unknown, or one too many.
        """
        try:
            messages = self._reader.feed(data)
        except MessageTooLargeError as error:
            refusal = over_limit("message", self._limits.request_bytes, str(error))
            raise CallRefusedError(*refusal) from None
        except CompressedMessageError as error:
            # The trailers say how the client may ask again (gRPC over HTTP/2, compression).
            raise CallRefusedError(
                grpc.StatusCode.UNIMPLEMENTED,
                f"{error} (grpc-encoding {self._encoding[:20]}): send messages uncompressed",
                headers.ACCEPTED_ENCODINGS,
            ) from None
        except UnknownFlagsError as error:
            raise CallRefusedError(grpc.StatusCode.INTERNAL, str(error)) from None

        for message in messages:
            self.messages.append(message)
            self._kept += PREFIX_BYTES + len(message)
        if not self._request_streaming and len(self.messages) > 1:
            raise CallRefusedError(grpc.StatusCode.INTERNAL, "a call of one request has several")
        return len(messages)

    def end_request(self) -> None:
        """Check that the request is complete, now that the client has ended its side.

        Raises:
            CallRefusedError: the last message is incomplete, or the only one is missing.
        """
        if self._reader.held:
            raise CallRefusedError(grpc.StatusCode.INTERNAL, "a message ends amid its bytes")
        if not self._request_streaming and not self.messages:
            raise CallRefusedError(grpc.StatusCode.INTERNAL, "a call of one request has none")

    def begin(self) -> None:
        """Note that the call is handed to its handler, now or in a later turn."""
        assert not self.is_begun, "a call begins twice"
        self.is_begun = True

    def take_message(self) -> bytes | None:
        """Return the next message for the handler, None without any."""
        if not self.messages:
            return None
        message = self.messages.popleft()
        size = PREFIX_BYTES + len(message)
        self._kept -= size
        self._consumed += size
        return message

    def count_held(self) -> int:
        """Return the change of the request's size in memory since the last count."""
        held = self._reader.held + self._kept
        more, self.held = held - self.held, held
        return more

    def release(self) -> int:
        """Return the number of held bytes, and hold none."""
        held, self.held = self.held, 0
        return held

    def grant(self, unused: int) -> int:
        """Return how many bytes more the client may send, 0 if it has enough.

        `unused` is the rest of earlier grants.
        """
        ahead, reader = self._limits.lookahead_bytes, self._reader
        target = self._consumed + ahead
        # The handler waits for a message that is larger than the grant ahead.
        if reader.needs and not self.messages:
            target = max(target, self._consumed + reader.held + reader.needs)

        more = target - self._granted
        if more >= ahead // 2 or (more > 0 and reader.needs > unused):
            self._granted += more
            return more
        return 0

    # -- the answer

    def open_answer(self, head: bytes = headers.ANSWER_HEAD) -> bytes:
        """Return the headers to send before anything else, empty if there are none to send."""
        if self._has_head or self.has_ended:
            return b""
        self._has_head = True
        return head

    def finish(self, code: grpc.StatusCode, details: str, trailing: headers.Metadata) -> bytes:
        """End the call with a status. Return the block of headers that says so."""
        assert not self.has_ended, "a call ends twice"
        self.has_status = self.has_ended = True
        self.code = code
        self.details = details
        if code is OK and not details and not trailing:
            block = headers.STATUS_OK
        else:
            block = headers.status(int(code.value[0]), details, trailing)
        return block if self._has_head else headers.ANSWER_HEAD + block

    def drop(self) -> None:
        """End the call by a reset, without a status."""
        self.has_status = self.has_ended = True

    def close(self, *, by_client: bool) -> int:
        """Note that the stream is closed. Return the number of bytes that were held."""
        self.is_given_up = by_client and not self.has_status
        self.is_over = self.has_ended = True
        self.messages.clear()
        self._kept = 0
        return self.release()
