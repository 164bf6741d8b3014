"""Ends of reconciliation by SIGTERM and Ctrl-C: at once with an error, or after the work under way.

Either way the first signal ends the command, and a second one the process.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from streammeta.cli.framework.output import CommandError
from streammeta.cli.framework.signal_event import SignalEvent

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STDERR = 2


class Ending(SignalEvent):
    """Set by the first signal, of which `by` is the name."""

    by = ""


class _SignalError(KeyboardInterrupt):
    """Raised by the first signal, wherever the main thread is."""


@contextmanager
def interruptible(done: str, advice: str) -> Iterator[None]:
    """Have the first signal break off the block, whose `finally` clauses run.

    A library that is broken off may end by an error of its own.

    Raises:
        CommandError: it did: INTERRUPTED, with what is done by then and what to do.
    """
    struck: list[str] = []

    def end(number: int, _frame: FrameType | None) -> None:
        struck.append(signal.Signals(number).name)
        raise _SignalError(*struck)

    try:
        with _first_signal(end):
            yield
    except (_SignalError, Exception):
        if not struck:
            raise
        raise CommandError("INTERRUPTED", f"ended by {struck[0]}: {done}", advice) from None


@contextmanager
def ending_event() -> Iterator[Ending]:
    """Give an event that the first signal sets, which is told."""
    ending = Ending()

    def end(number: int, _frame: FrameType | None) -> None:
        ending.by = signal.Signals(number).name
        ending.set()
        line = f"{ending.by}: ends after what is under way; another signal ends it at once\n"
        # Past the stream, which refuses a line in the midst of another.
        with suppress(OSError):
            os.write(_STDERR, line.encode())

    with _first_signal(end):
        yield ending


@contextmanager
def _first_signal(act: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have the first signal within the block call `act`, and later ones do what they did before.

    Signals are the main thread's; in any other the block is as it is.
    """
    has_come = False

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.getsignal(one) for one in _SIGNALS}

    def restore() -> None:
        for one, handler in before.items():
            signal.signal(one, handler)

    def once(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        restore()
        if has_come:  # what ran meanwhile has put this handler back
            signal.raise_signal(number)
        else:
            has_come = True
            act(number, frame)

    for one in _SIGNALS:
        signal.signal(one, once)
    try:
        yield
    finally:
        restore()
