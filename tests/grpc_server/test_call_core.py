"""The state machine of a call: its invariants hold whatever client and handler do."""

from __future__ import annotations

import random

import grpc
import pytest

from streammeta.controller.grpc_server.call_core import CallCore, CallRefusedError
from streammeta.controller.grpc_server.limits import Limits
from streammeta.controller.grpc_server.messages import framed
from tests.kit.seeds import seeds

_LIMITS = Limits(request_bytes=300, lookahead_bytes=100)


def new_core(*, request_streaming: bool) -> CallCore:
    return CallCore(_LIMITS, "gzip", request_streaming)


def receive_all(core: CallCore, data: bytes) -> None:
    for at in range(len(data)):
        core.receive(data[at : at + 1])
    core.end_request()


class CallSimulation:
    """A core between a client that sends in pieces and a handler that takes and answers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core = new_core(request_streaming=True)
        self.messages = [
            self.rng.randbytes(self.rng.choice((0, 1, 30, 120, 250, 300))) for _ in range(30)
        ]
        self.wire = b"".join(map(framed, self.messages))
        self.sent = self.consumed = self.held = 0
        self.window = _LIMITS.lookahead_bytes
        self.taken: list[bytes] = []
        self.output: list[str] = []
        """Parts of the answer: head, message and status."""

    def step(self) -> None:
        """Let one event happen, and check the invariants."""
        events = [self.send, self.send, self.take, self.take, self.write, self.open]
        if self.rng.random() < 0.02:
            events = [self.finish, self.drop, self.close]
        self.rng.choice(events)()
        self.check()

    def send(self) -> None:
        size = min(self.rng.randrange(1, 120), self.window - self.sent)
        data = self.wire[self.sent : self.sent + size]
        if data and not self.core.has_ended:
            self.sent += len(data)
            self.core.receive(data)
            self.account()

    def take(self) -> None:
        message = self.core.take_message()
        if message is not None:
            self.taken.append(message)
            self.consumed += len(framed(message))
            if not self.core.has_ended:
                self.account()

    def account(self) -> None:
        self.held += self.core.count_held()
        self.window += self.core.grant(self.window - self.sent)

    def open(self) -> None:
        if self.core.open_answer():
            self.output.append("head")

    def write(self) -> None:
        if not self.core.has_ended:
            self.open()
            self.output.append("message")

    def finish(self) -> None:
        if not self.core.has_ended:
            self.core.finish(grpc.StatusCode.OK, "", ())
            self.output.append("status")

    def drop(self) -> None:
        if not self.core.is_over:
            self.core.drop()
            self.close()

    def close(self) -> None:
        by_client, had_status = self.rng.random() < 0.5, self.core.has_status
        if not self.core.is_over:
            self.held -= self.core.close(by_client=by_client)
            assert self.core.is_given_up == (by_client and not had_status)

    def check(self) -> None:
        core = self.core
        assert self.taken == self.messages[: len(self.taken)], "a message was lost or torn"
        assert self.held == core.held, "memory was counted twice, or stays counted"
        if core.is_over:
            assert core.held == 0
            assert core.take_message() is None
        elif not core.has_ended:
            assert core.held == self.sent - self.consumed
            self.check_window()
        assert self.output.count("head") <= 1
        assert self.output.count("status") <= 1
        assert "status" not in self.output[:-1], "something follows the status"
        if "message" in self.output:
            assert self.output[0] == "head"

    def check_window(self) -> None:
        left = self.messages[len(self.taken) :]
        next_bytes = len(framed(left[0])) if left else 0
        ahead = self.window - self.consumed
        assert ahead <= max(_LIMITS.lookahead_bytes, next_bytes), "too much was granted"
        if not self.core.messages and left:
            assert self.window > self.sent, "client and handler wait for each other"


@pytest.mark.parametrize("seed", seeds(66, slow=134))
def test_a_call_keeps_its_invariants(seed: int) -> None:
    simulation = CallSimulation(seed)
    for _ in range(200):
        simulation.step()


@pytest.mark.parametrize("seed", seeds(6, slow=14))
def test_all_messages_arrive_if_nothing_ends_the_call(seed: int) -> None:
    simulation = CallSimulation(seed)
    while len(simulation.taken) < len(simulation.messages):
        simulation.rng.choice((simulation.send, simulation.take))()
        simulation.check()
    simulation.core.end_request()
    assert simulation.held == 0


@pytest.mark.parametrize(
    "sent",
    [
        framed(b"a") + framed(b"b"),
        b"",
        framed(b"abc")[:-1],
        b"\1" + framed(b"abc")[1:],
        b"\2" + framed(b"abc")[1:],
        framed(bytes(301)),
    ],
    ids=["several", "none", "torn", "compressed", "unknown flags", "too large"],
)
def test_a_call_of_one_request_has_exactly_one(sent: bytes) -> None:
    core = new_core(request_streaming=False)
    with pytest.raises(CallRefusedError):
        receive_all(core, sent)


def test_a_request_is_held_until_its_call_begins() -> None:
    """Also if it is complete, and its client has yet to say that no other follows."""
    core = new_core(request_streaming=False)
    core.receive(framed(b"abc"))
    assert core.count_held() == core.held == len(framed(b"abc"))
    core.end_request()
    assert core.release() == len(framed(b"abc"))
    assert core.held == 0
    assert core.take_message() == b"abc"


def test_headers_do_not_follow_the_status() -> None:
    core = new_core(request_streaming=False)
    core.finish(grpc.StatusCode.NOT_FOUND, "gone", ())
    assert core.open_answer() == b""
