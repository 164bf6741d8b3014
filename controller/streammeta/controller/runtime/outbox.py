"""What leaves a replica: messages held until their write is durable, and answers to peers.

A request goes to the transport; an answer to the call of the peer that waits for it, if it still
does.
"""

from __future__ import annotations

from collections import deque

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum.events import Send
from streammeta.controller.quorum.messages import Request, RequestHeader, Response, ResponseHeader
from streammeta.controller.runtime.quorum_transport import PeerTransport
from streammeta.controller.runtime.waiting import WaitingCallers


class Outbox:
    """Sends in the order the core asks, but nothing before the write it depends on."""

    def __init__(self, transport: PeerTransport) -> None:
        self._transport = transport
        self._durable_token = 0
        self._state_token = 0
        """The last quorum-state that became durable ahead of its turn."""
        self._held: deque[Send] = deque()
        self.calls: WaitingCallers[tuple[NodeId, int, int], Response] = WaitingCallers()
        """Calls of peers by `call_key`."""

    def send(self, effect: Send) -> None:
        """Send a message once the write it depends on is durable."""
        if self._must_wait(effect):
            self._held.append(effect)
        elif isinstance(effect.message, Request):
            self._transport.send(effect.message)
        else:
            header = effect.message.header
            self.calls.answer(call_key(header.receiver, header), effect.message)

    def durable(self, token: int) -> None:
        """Every write up to `token` is durable: send what waited for it."""
        self._durable_token = token
        self._send_held()

    def state_durable(self, token: int) -> None:
        """The quorum-state `token` is durable, though not everything asked for before it."""
        self._state_token = token
        self._send_held()

    def _must_wait(self, effect: Send) -> bool:
        is_state_durable = not effect.vouches_for_log and effect.after <= self._state_token
        return effect.after > self._durable_token and not is_state_durable

    def _send_held(self) -> None:
        held, self._held = self._held, deque()
        for effect in held:
            self.send(effect)

    def close(self, error: Exception) -> None:
        """Forget what is held, and fail the calls that wait."""
        self._held.clear()
        self.calls.fail_all(error)


def call_key(caller: NodeId, header: RequestHeader | ResponseHeader) -> tuple[NodeId, int, int]:
    """Return what tells one call of a peer from all others."""
    return caller, header.incarnation, header.request_id
