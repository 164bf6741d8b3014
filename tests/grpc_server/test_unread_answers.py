"""Frames of a client that does not read what they are answered with."""

from streammeta.controller.grpc_server.frames import Kind, frame
from tests.grpc_server.turn_meter import GREETING, Client, echoed, new_server, settings

_PING = frame(Kind.PING, 0, 0, b"the last")
_FLOODS = {
    "pings": frame(Kind.PING, 0, 0, bytes(8)) * 5_000,
    "settings": settings() * 900,
    "calls": b"".join(echoed(stream_id) for stream_id in range(1, 2_001, 2)),
}


async def test_frames_wait_while_their_answers_may_not_go() -> None:
    """Otherwise all that was read at once is answered in memory, several times as long."""
    for flood in _FLOODS.values():
        client = Client(new_server())
        client.say(GREETING)
        client.connection.pause_writing()
        before = len(client.transport.sent)
        client.say(flood, _PING)
        assert client.transport.is_paused
        assert len(client.transport.sent) == before

        client.connection.resume_writing()
        await client.settled()
        assert not client.transport.is_paused
        assert client.is_answered(b"the last")
        client.connection.connection_lost(None)


async def test_a_connection_whose_frames_wait_ends_as_others_do() -> None:
    server = new_server()
    client = Client(server)
    client.say(GREETING)
    client.connection.pause_writing()
    client.say(echoed(1))
    client.connection.connection_lost(None)
    assert not server.connections
    assert server.calls == 0
