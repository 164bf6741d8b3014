"""What the product's operations mean for one key, seen by its clients: values and streams.

A model is a state and a rule: given a state, a request and its answer, could this have happened,
and what is the state then? Written from the contract in `proto/`, not from the product's code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tests.linearizability.checker import Model
from tests.linearizability.history import Operation, Unknown

# ---- keys and values ----


@dataclasses.dataclass(frozen=True, slots=True)
class Get:
    """Read a key."""

    def __str__(self) -> str:
        return "get"


@dataclasses.dataclass(frozen=True, slots=True)
class Put:
    """Write a key on a condition.

    `expected_version` None: only `overwrite` counts; 0: if absent; else: if at this version.
    """

    value: str
    expected_version: int | None = None
    overwrite: bool = True

    def __str__(self) -> str:
        if self.expected_version is not None:
            return f"put {self.value} at version {self.expected_version}"
        return f"put {self.value}" + ("" if self.overwrite else " if absent")


@dataclasses.dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key, if given only at this version."""

    expected_version: int | None = None

    def __str__(self) -> str:
        at = "" if self.expected_version is None else f" at version {self.expected_version}"
        return f"delete{at}"


@dataclasses.dataclass(frozen=True, slots=True)
class KVAnswer:
    """A `KVResult`: `applied` is error NONE; value and version as there, value None if not found.

    That is: for a Get and a refused write what is stored, for a Put what it stored, for a Delete
    what it deleted.
    """

    applied: bool
    value: str | None
    version: int

    def __str__(self) -> str:
        held = "absent" if self.value is None else f"{self.value} at version {self.version}"
        return held if self.applied else f"refused: {held}"


@dataclasses.dataclass(frozen=True, slots=True)
class KVState:
    """A key: value None if absent; version None if an ambiguous Put wrote it, 0 if absent.

    Every later version is higher than `floor`, also after a deletion.
    """

    value: str | None = None
    version: int | None = 0
    floor: int = 0

    def seen(self, value: str | None, version: int) -> KVState | None:
        """Return the state if it may be seen as this value at this version, else None."""
        if value != self.value:
            return None
        if self.version is not None:
            return self if version == self.version else None
        return KVState(value, version, version) if version > self.floor else None

    def at(self, version: int) -> KVState | None:
        """Return the state if it may be at this version, 0 meaning absent, else None."""
        return self.seen(self.value, version)


KVRequest = Get | Put | Delete


class KVModel:
    """A register with versions: PutKVs, GetKVs and DeleteKVs of one key."""

    initial = KVState()
    values: ClassVar[dict[str, type]] = {
        item.__name__: item for item in (Get, Put, Delete, KVAnswer)
    }

    def step(
        self, state: KVState, request: KVRequest, answer: KVAnswer | Unknown
    ) -> tuple[bool, KVState]:
        """See `Model.step`."""
        if isinstance(answer, Unknown):
            return True, self._attempt(state, request)
        after = self._answered(state, request, answer)
        return after is not None, state if after is None else after

    def is_read(self, request: KVRequest) -> bool:
        """See `Model.is_read`."""
        return isinstance(request, Get)

    def order(self, operation: Operation[Any, Any]) -> int | None:
        """See `Model.order`: versions only grow, so who names one says when it was current."""
        answer = operation.answer
        if isinstance(answer, Unknown) or answer.value is None:
            return None
        if isinstance(operation.request, Get) or not answer.applied:
            return 3 * int(answer.version) + 1
        return 3 * int(answer.version) + (2 if isinstance(operation.request, Delete) else 0)

    def relevant(self, history: Sequence[Operation[Any, Any]]) -> list[Operation[Any, Any]]:
        """Leave out ambiguous Gets, and ambiguous Puts of values that were never seen.

        Such a Put may as well not have happened, provided no write was conditional on its version:
        every expected version must be known from an answer to belong to another value.
        """
        answers = [op.answer for op in history if not isinstance(op.answer, Unknown)]
        seen = {answer.value for answer in answers}
        known = {0, None, *(answer.version for answer in answers)}
        guesses = any(
            op.request.expected_version not in known
            for op in history
            if not isinstance(op.request, Get)
        )
        return [
            op
            for op in history
            if not isinstance(op.answer, Unknown)
            or isinstance(op.request, Delete)
            or (isinstance(op.request, Put) and (guesses or op.request.value in seen))
        ]

    def _attempt(self, state: KVState, request: KVRequest) -> KVState:
        if isinstance(request, Get):
            return state
        before = _where_condition_holds(state, request)
        if before is None:
            return state
        if isinstance(request, Put):
            return KVState(request.value, None, before.floor)
        return KVState(None, 0, before.floor)

    def _answered(self, state: KVState, request: KVRequest, answer: KVAnswer) -> KVState | None:
        if isinstance(request, Get):
            return state.seen(answer.value, answer.version)
        if not answer.applied:
            refusing = state.seen(answer.value, answer.version)
            if refusing is None or _where_condition_holds(refusing, request) is not None:
                return None
            return refusing
        before = _where_condition_holds(state, request)
        if before is None:
            return None
        if isinstance(request, Put):
            if answer.value != request.value or answer.version <= before.floor:
                return None
            return KVState(answer.value, answer.version, answer.version)
        deleted = before.seen(answer.value, answer.version)
        return None if deleted is None else KVState(None, 0, deleted.floor)


def _where_condition_holds(state: KVState, request: Put | Delete) -> KVState | None:
    """Return the state, its version known if the condition tells it, or None if it fails."""
    if isinstance(request, Delete) and state.value is None:
        return None
    if request.expected_version is not None:
        return state.at(request.expected_version)
    if isinstance(request, Put) and not request.overwrite and state.value is not None:
        return None
    return state


# ---- streams ----


@dataclasses.dataclass(frozen=True, slots=True)
class CommitRange:
    """Commit an object that holds the stream's records [start, end); idempotent by object id."""

    object_id: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"commit object {self.object_id}: [{self.start}, {self.end})"


@dataclasses.dataclass(frozen=True, slots=True)
class ReadEnd:
    """Ask where the stream ends."""

    def __str__(self) -> str:
        return "read end"


@dataclasses.dataclass(frozen=True, slots=True)
class ReadObjects:
    """Ask which objects hold the stream, from its first record to its end."""

    def __str__(self) -> str:
        return "read objects"


@dataclasses.dataclass(frozen=True, slots=True)
class Committed:
    """The range was accepted, now or by an earlier try."""

    def __str__(self) -> str:
        return "committed"


@dataclasses.dataclass(frozen=True, slots=True)
class NotAtEnd:
    """OFFSET_NOT_MATCHED: the range does not begin where the stream ends."""

    def __str__(self) -> str:
        return "refused: not at the end"


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """The stream's end offset."""

    offset: int

    def __str__(self) -> str:
        return f"end {self.offset}"


@dataclasses.dataclass(frozen=True, slots=True)
class Objects:
    """The stream's objects, in the order of its records."""

    object_ids: tuple[int, ...]

    def __str__(self) -> str:
        return f"objects {list(self.object_ids)}"


@dataclasses.dataclass(frozen=True, slots=True)
class StreamState:
    """Where the stream ends, and the objects committed to it."""

    end: int = 0
    object_ids: tuple[int, ...] = ()


StreamRequest = CommitRange | ReadEnd | ReadObjects
StreamAnswer = Committed | NotAtEnd | End | Objects


class StreamModel:
    """A list that grows at its end: commits of one stream's ranges, and reads of it.

    Trimming, fencing and compaction are outside; a commit refused for other reasons has failed.
    """

    initial = StreamState()
    values: ClassVar[dict[str, type]] = {
        item.__name__: item
        for item in (CommitRange, ReadEnd, ReadObjects, Committed, NotAtEnd, End, Objects)
    }

    def step(
        self, state: StreamState, request: StreamRequest, answer: StreamAnswer | Unknown
    ) -> tuple[bool, StreamState]:
        """See `Model.step`."""
        match request:
            case ReadEnd():
                return isinstance(answer, Unknown) or answer == End(state.end), state
            case ReadObjects():
                return isinstance(answer, Unknown) or answer == Objects(state.object_ids), state
            case CommitRange():
                return self._commit(state, request, answer)

    def is_read(self, request: StreamRequest) -> bool:
        """See `Model.is_read`."""
        return not isinstance(request, CommitRange)

    def order(self, operation: Operation[Any, Any]) -> int | None:
        """See `Model.order`: the search is short here without it, as only one offset fits."""
        del operation
        return None

    def relevant(self, history: Sequence[Operation[Any, Any]]) -> list[Operation[Any, Any]]:
        """Leave out ambiguous reads."""
        return [
            op
            for op in history
            if not isinstance(op.answer, Unknown) or isinstance(op.request, CommitRange)
        ]

    def _commit(
        self, state: StreamState, request: CommitRange, answer: StreamAnswer | Unknown
    ) -> tuple[bool, StreamState]:
        if request.object_id in state.object_ids:
            after, truth = state, Committed()
        elif request.start != state.end:
            return isinstance(answer, Unknown | NotAtEnd), state
        else:
            after = StreamState(request.end, (*state.object_ids, request.object_id))
            truth = Committed()
        return isinstance(answer, Unknown) or answer == truth, after


MODELS: dict[str, Model] = {"kv": KVModel(), "stream": StreamModel()}
"""By the name that a history's file gives."""


def values_of(model: str) -> dict[str, type]:
    """Return the classes of a model's requests and answers by name, for `load`."""
    if model not in MODELS:
        raise ValueError(f"model {model!r}; known are {', '.join(sorted(MODELS))}")
    return MODELS[model].values
