"""What the quorum driver asks of the network, and what the network tells it."""

from __future__ import annotations

from typing import Protocol

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum.messages import Request, Response
from streammeta.controller.quorum.voters import VoterSet


class PeerListener(Protocol):
    """Told what became of requests; all calls on the event loop."""

    def on_response(self, response: Response) -> None:
        """A peer answered."""
        ...

    def on_request_failed(self, peer: NodeId, request_id: int) -> None:
        """No answer will come."""
        ...

    def on_connection_lost(self, peer: NodeId) -> None:
        """The peer's end was reset or refused: its process is probably gone."""
        ...


class PeerTransport(Protocol):
    """Carries requests to the other replicas, and knows where they are."""

    def bind(self, listener: PeerListener) -> None:
        """Connect the listener; once, before the first `send`."""
        ...

    def send(self, request: Request) -> None:
        """Start sending to the request's receiver; never blocks, never raises."""
        ...

    def set_voters(self, voters: VoterSet) -> None:
        """These voters, at these endpoints, are in force from now on."""
        ...

    def endpoint(self, node_id: NodeId) -> str | None:
        """Return where a node can be reached, as best known; None if it is not."""
        ...

    async def close(self) -> None:
        """Give up what is in flight and release connections."""
        ...
