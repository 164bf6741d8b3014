"""What clients asked and what they were told, with the times: the raw material of a check.

Records operations of many clients at once, and keeps them in a file of JSON lines, so that the
history of a failed run can be checked again later. Knows nothing of what an operation means; that
is the models' part.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Generic, NewType, TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class Unknown(Enum):
    """Stands for the answer of an operation that may or may not have taken effect."""

    UNKNOWN = "unknown"


UNKNOWN = Unknown.UNKNOWN


@dataclasses.dataclass(frozen=True, slots=True)
class Operation(Generic[Request, Answer]):
    """One operation of a client, from invocation to answer.

    It takes effect at one moment between `invoked` and `returned`. `returned` is None and `answer`
    UNKNOWN if it is ambiguous: it takes effect at some moment after `invoked`, or never.
    """

    client: str
    key: str
    request: Request
    invoked: int
    returned: int | None = None
    answer: Answer | Unknown = UNKNOWN

    def __post_init__(self) -> None:
        if (self.returned is None) != isinstance(self.answer, Unknown):
            raise ValueError(
                f"returned {self.returned} with answer {self.answer}: an operation has both or none"
            )
        if self.returned is not None and self.returned < self.invoked:
            raise ValueError(f"returned at {self.returned}, invoked at {self.invoked}: runs back")


Handle = NewType("Handle", int)
"""An operation in flight."""


class Recorder:
    """Takes down operations; safe to use from threads and tasks at once.

    `clock` returns integers that never fall. The default counts calls, which orders all events of
    one process exactly; several processes on one machine may share `time.monotonic_ns`. Events of
    equal time count as overlapping.
    """

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock if clock is not None else itertools.count().__next__
        self._lock = threading.Lock()
        self._operations: list[Operation[Any, Any] | None] = []
        self._open: set[int] = set()

    def invoke(self, client: str, key: str, request: Any) -> Handle:
        """Note that `client` is about to send `request`; call it before anything is sent."""
        with self._lock:
            handle = Handle(len(self._operations))
            self._operations.append(Operation(client, key, request, self._clock()))
            self._open.add(handle)
            return handle

    def complete(self, handle: Handle, answer: Any) -> None:
        """Note the answer; call it as soon as the client has it."""
        with self._lock:
            operation = self._close(handle)
            self._operations[handle] = dataclasses.replace(
                operation, returned=self._clock(), answer=answer
            )

    def fail(self, handle: Handle) -> None:
        """Note that the operation certainly has not taken effect and never will."""
        with self._lock:
            self._close(handle)
            self._operations[handle] = None

    def ambiguous(self, handle: Handle) -> None:
        """Note that the outcome is unknown: a time-out, a lost connection, an unknown outcome."""
        with self._lock:
            self._close(handle)

    def history(self) -> tuple[Operation[Any, Any], ...]:
        """Return all operations but the failed ones; those in flight are ambiguous."""
        with self._lock:
            return tuple(item for item in self._operations if item is not None)

    def _close(self, handle: Handle) -> Operation[Any, Any]:
        operation = self._operations[handle]
        if operation is None or handle not in self._open:
            raise ValueError(f"operation {handle} has ended already")
        self._open.discard(handle)
        return operation


def dump(path: Path, model: str, history: Iterable[Operation[Any, Any]]) -> None:
    """Write a history for `load`; `model` is the name of the model that judges it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"model": model}) + "\n")
        for operation in history:
            file.write(json.dumps(_to_json(operation)) + "\n")


def load(path: Path, values: Callable[[str], dict[str, type]]) -> tuple[str, list[Any]]:
    """Return the model's name and the operations of a file written by `dump`.

    `values` returns the classes of a model's requests and answers by name. Raises ValueError that
    names the line if the file is not such a file.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        model = str(json.loads(lines[0])["model"])
    except (IndexError, KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(f'{path}, line 1: expected {{"model": NAME}}; not a history') from None
    classes = values(model)
    operations = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            operations.append(_from_json(json.loads(line), classes))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}; not an operation") from None
    return model, operations


def _to_json(operation: Operation[Any, Any]) -> dict[str, Any]:
    fields = {
        "client": operation.client,
        "key": operation.key,
        "request": _value_to_json(operation.request),
        "invoked": operation.invoked,
    }
    if operation.returned is not None:
        fields["returned"] = operation.returned
        fields["answer"] = _value_to_json(operation.answer)
    return fields


def _value_to_json(value: Any) -> dict[str, Any]:
    return {"type": type(value).__name__, **dataclasses.asdict(value)}


def _from_json(fields: dict[str, Any], classes: dict[str, type]) -> Operation[Any, Any]:
    answer = _value_from_json(fields["answer"], classes) if "answer" in fields else UNKNOWN
    return Operation(
        client=fields["client"],
        key=fields["key"],
        request=_value_from_json(fields["request"], classes),
        invoked=fields["invoked"],
        returned=fields.get("returned"),
        answer=answer,
    )


def _value_from_json(fields: dict[str, Any], classes: dict[str, type]) -> Any:
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields.items()
        if name != "type"
    }
    return classes[fields["type"]](**given)
