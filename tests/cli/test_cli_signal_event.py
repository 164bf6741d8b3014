"""Events that handlers of signals set: at any step of the thread that waits."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from streammeta.cli.framework.signal_event import SignalEvent
from tests.kit.waiting import PATIENCE_S


def test_an_event_may_be_set_at_any_line_of_the_thread_that_waits() -> None:
    lines = wait_and_set_at(0)
    assert lines > 1
    for line in range(1, lines + 1):
        wait_and_set_at(line)


def wait_and_set_at(line: int) -> int:
    """Wait for an event that is set at this line of all that run meanwhile; returns how many do."""
    event, seen = SignalEvent(), 0

    def trace(_frame: FrameType, what: str, _argument: Any) -> Any:
        nonlocal seen
        if what == "line":
            seen += 1
            if seen == line:
                sys.settrace(None)
                event.set()
                sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        was_set = event.wait(0.0)
    finally:
        sys.settrace(before)
    assert was_set == event.is_set() == bool(line)
    return seen


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("receiver", ["main thread", "another"])
def test_a_signal_ends_a_wait(receiver: str) -> None:
    event = SignalEvent()
    before = signal.signal(signal.SIGUSR1, lambda *_: event.set())

    def send() -> None:
        thread = threading.main_thread() if receiver == "main thread" else sender
        assert thread.ident is not None
        signal.pthread_kill(thread.ident, signal.SIGUSR1)

    sender = threading.Timer(0.05, send)
    try:
        sender.start()
        assert event.wait(10 * PATIENCE_S)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("is_set", [False, True])
def test_a_wait_without_time_tells_whether_the_event_is_set(is_set: bool) -> None:
    event = SignalEvent()
    if is_set:
        event.set()
    assert event.is_set() == event.wait(0.0) == event.wait(0.0) == is_set
