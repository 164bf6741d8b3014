"""SIGTERM and Ctrl-C during reconciliation: stop at once, or after the current work.

The first signal ends the command, and a second one the process.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from streammeta.cli.framework import output, signal_event

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STDERR = 2


class Ending(signal_event.SignalEvent):
    """Event that the first signal sets. `by` is its name."""

    by = ""


# A KeyboardInterrupt passes through `except Exception` in libraries.
class _SignalError(KeyboardInterrupt):
    """Raised by the first signal, wherever the main thread is."""


@contextmanager
def interruptible(done: str, advice: str) -> Iterator[None]:
    """Let the first signal interrupt the block. Its `finally` clauses run.

    An interrupted library may raise its own error.

    Raises:
        CommandError: INTERRUPTED, with the finished work and the next step.
    """
    struck: list[str] = []

    def end(number: int, _frame: FrameType | None) -> None:
        # Noted before raising, because a library may turn the exception into another one.
        struck.append(signal.Signals(number).name)
        raise _SignalError(*struck)

    try:
        with _first_signal(end):
            yield
    except (_SignalError, Exception):
        if not struck:
            raise
        raise output.CommandError("INTERRUPTED", f"ended by {struck[0]}: {done}", advice) from None


@contextmanager
def ending_event() -> Iterator[Ending]:
    """Return an event that the first signal sets and announces."""
    ending = Ending()

    def end(number: int, _frame: FrameType | None) -> None:
        # The name comes first: whoever sees the event may read it.
        ending.by = signal.Signals(number).name
        ending.set()
        line = f"{ending.by}: stopping after the current work. Another signal stops at once\n"
        # Past the stream, which refuses a line in the midst of another.
        with suppress(OSError):
            os.write(_STDERR, line.encode())

    with _first_signal(end):
        yield ending


@contextmanager
def _first_signal(act: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let the first signal within the block call `act`, and restore the former handlers.

    Only the main thread receives signals. In other threads the block runs unchanged.
    """
    has_come = False

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def once(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        # Restored before anything else, so that a second signal ends the process.
        restore()
        if has_come:  # what ran meanwhile has put this handler back
            signal.raise_signal(number)
        else:
            has_come = True
            act(number, frame)

    for number in _SIGNALS:
        signal.signal(number, once)
    try:
        yield
    finally:
        restore()
