"""Runs a controller like `streammeta controller` and records when the steps of a commit happen.

    python -m scripts.benchmarks.timed_controller STAMPS controller --node-id ...

The product has no hooks for this. Its functions in `POINTS`, one line for each step, are wrapped
before it starts. Stamps are CLOCK_MONOTONIC, which all processes of a machine share. They are kept
in memory and written to the file STAMPS, as JSON, when the controller ends.
"""

import functools
import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from scripts.benchmarks.observed_controller import run_product, set_up_grpc
from streammeta.controller.quorum import events, messages

PRODUCT = "streammeta.controller."

EndOffset: TypeAlias = Callable[[Sequence[Any], Any], int | None]
"""Returns, from a call's arguments and result, the end offset of the entries in question, 0 if the
call does not know it, and None if the call is not a step of a commit."""


@dataclass(frozen=True, slots=True)
class Point:
    """A step, and the function whose call is the step."""

    role: Literal["leader", "follower", "each"]
    step: str
    place: str
    """The function, as MODULE:QUALIFIED.NAME within the controller's package."""
    moment: Literal["enters", "returns"] = "enters"
    end_offset: EndOffset = lambda _arguments, _result: 0


_unflushed: list[int] = []
"""End offset of the journal's unflushed batches. One thread at a time writes to it."""


def _given(arguments: Sequence[Any], _result: Any) -> int:
    end_offset: int = arguments[1][-1].end_offset
    _unflushed[:] = [end_offset]
    return end_offset


def _flushed(_arguments: Sequence[Any], _result: Any) -> int | None:
    return _unflushed.pop() if _unflushed else None


def _end_of_batches(message: Any) -> int | None:
    has_batches = isinstance(message, messages.FetchResponse) and message.batches
    return message.batches[-1].end_offset if has_batches else None


def _fetched_below(message: Any) -> int | None:
    return message.fetch_offset if isinstance(message, messages.FetchRequest) else None


def _reported(arguments: Sequence[Any], _result: Any) -> int | None:
    is_write = isinstance(arguments[1], events.WriteDone)
    return arguments[0]._core.log.end_offset if is_write else None


def _offset_of_message(arguments: Sequence[Any], _result: Any) -> int | None:
    return None if arguments[1] is None else 0


_COMMITS, _CODEC = "rpc.services.commit_pipeline:", "rpc.codec.wire_columns:"
_METADATA = "metadata.cluster_metadata:ClusterMetadata."
_JOURNAL = "journal.journal:Journal."
_DRIVER = "runtime.replication.quorum_driver:QuorumDriver."
_HIGH_WATERMARK = "runtime.writer.controller:MetadataController.on_committed"

POINTS = (
    Point("leader", "request is read", _COMMITS + "_Ahead.put", "enters", _offset_of_message),
    Point("leader", "request is read", _CODEC + "parse_commit"),
    Point("leader", "decided", _METADATA + "decide", "returns"),
    Point("leader", "replayed", _METADATA + "apply", "returns"),
    Point("leader", "appended", _DRIVER + "append", "returns", lambda _, end_offset: end_offset),
    Point(
        *("leader", "batch is in the log", "quorum.leading:Leading.append", "returns"),
        lambda call, _: call[0]._replica.log.end_offset,
    ),
    Point(
        *("leader", "Fetch is answered", "runtime.replication.core_loop:Outbox.send", "enters"),
        lambda call, _: _end_of_batches(call[1].message),
    ),
    Point(
        *("leader", "batch is with the transport"),
        *("peers.server:_AcceptedConnection._reply", "returns"),
        lambda call, response: _end_of_batches(response or call[-1]),
    ),
    Point("each", "journal begins", _JOURNAL + "append", "enters", _given),
    Point("each", "flushed", _JOURNAL + "sync", "returns", _flushed),
    Point("each", "flush is reported", _DRIVER + "_on_report", "enters", _reported),
    Point(
        *("leader", "follower's Fetch is read", _DRIVER + "handle", "enters"),
        lambda call, _: _fetched_below(call[1]),
    ),
    Point(
        *("leader", "high watermark passes it", _HIGH_WATERMARK, "enters"), lambda call, _: call[2]
    ),
    Point("leader", "answer is encoded", _COMMITS + "DecidedMessage.response", "returns"),
    Point("leader", "answer is encoded", _CODEC + "commit_stream_set_object_out", "returns"),
    Point(
        *("follower", "batch is read", _DRIVER + "on_response", "enters"),
        lambda call, _: _end_of_batches(call[1]),
    ),
    Point(
        *("follower", "next Fetch is with the transport"),
        *("peers.transport:TcpPeerTransport.send", "enters"),
        lambda call, _: _fetched_below(call[1]),
    ),
)


class _Stamps:
    """Times of steps, by the number of their point."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int, int]] = []

    def install(self) -> None:
        """Wrap the functions of all points."""
        importlib.import_module(f"{PRODUCT}process.server")
        for number, point in enumerate(POINTS):
            owner, name, function = find(point)
            _replace(owner, name, function, self._stamping(function, number))

    def write(self, path: Path) -> None:
        """Write all stamps to a file."""
        path.write_text(json.dumps({"stamps": self._taken}))

    def _stamping(self, function: Callable[..., Any], number: int) -> Callable[..., Any]:
        point, taken = POINTS[number], self._taken
        is_before = point.moment == "enters"

        def note(at_ns: int, arguments: Sequence[Any], result: Any) -> None:
            end_offset = point.end_offset(arguments, result)
            if end_offset is not None:
                taken.append((number, at_ns, end_offset))

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            at_ns = time.monotonic_ns()
            result = function(*arguments, **named)
            note(at_ns if is_before else time.monotonic_ns(), arguments, result)
            return result

        @functools.wraps(function)
        async def waiting_call(*arguments: Any, **named: Any) -> Any:
            if is_before:
                note(time.monotonic_ns(), arguments, None)
            result = await function(*arguments, **named)
            if not is_before:
                note(time.monotonic_ns(), arguments, result)
            return result

        return waiting_call if inspect.iscoroutinefunction(function) else call


def find(point: Point) -> tuple[Any, str, Callable[..., Any]]:
    """Return the owner of a point's function, its name there, and the function."""
    module, _, path = point.place.partition(":")
    owner: Any = importlib.import_module(PRODUCT + module)
    *outer, name = path.split(".")
    for attribute in outer:
        owner = getattr(owner, attribute)
    return owner, name, getattr(owner, name)


def _replace(owner: Any, name: str, function: Any, replacement: Callable[..., Any]) -> None:
    """Put `replacement` wherever the product refers to the function, by name or in a table."""
    setattr(owner, name, replacement)
    if inspect.isclass(owner):
        return
    for module in [loaded for key, loaded in sys.modules.items() if key.startswith(PRODUCT)]:
        for key, value in list(vars(module).items()):
            if value is function:
                setattr(module, key, replacement)
            elif isinstance(value, dict) and not key.startswith("__"):
                value.update({k: replacement for k, held in value.items() if held is function})


def main() -> int:
    """Run the controller named on the command line and return its exit code."""
    _, path, *arguments = sys.argv
    set_up_grpc()
    stamps = _Stamps()
    stamps.install()
    try:
        return run_product(arguments)
    finally:
        stamps.write(Path(path))


if __name__ == "__main__":
    sys.exit(main())
