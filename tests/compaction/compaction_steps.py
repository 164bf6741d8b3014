"""What a process asks of the outside world, step by step: each can fail, lose its answer, or kill.

A step is one call of the object store or one attempt at an RPC. Before and after each of them a
test may look at the world, or change it. Knows neither compaction nor what the calls are about.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

import grpc

from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_store.base import (
    Body,
    DeleteResult,
    MultipartUpload,
    ObjectInfo,
    ObjectStore,
    Tags,
    UploadedPart,
)
from streammeta.storage.object_store.calls import StoreMetrics

ResultT = TypeVar("ResultT")

PATIENCE_S = 20.0


class Fate(Enum):
    """What becomes of a step."""

    FAIL = "fails before it does anything"
    LOSE_ANSWER = "is done, and its answer is lost"
    KILL_BEFORE = "kills the process before it is done"
    KILL_AFTER = "kills the process after it is done"

    @property
    def kills(self) -> bool:
        return self in (Fate.KILL_BEFORE, Fate.KILL_AFTER)


@dataclass(frozen=True, slots=True)
class Step:
    """The `ordinal`-th step of a process, from 1; `done`: it has just been made."""

    ordinal: int
    name: str
    done: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at the `at`-th step, and at the next ones up to `times` in all."""

    at: int
    fate: Fate
    times: int = 1

    def fate_of(self, ordinal: int) -> Fate | None:
        return self.fate if self.at <= ordinal < self.at + self.times else None


class RandomFaults:
    """Any step may fail, or lose its answer; a few of a hundred do."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self._rng = rng
        self._share = share

    def fate_of(self, _ordinal: int) -> Fate | None:
        if self._rng.random() >= self._share:
            return None
        return self._rng.choice([Fate.FAIL, Fate.LOSE_ANSWER])


class Fates(Protocol):
    """Decides on the fate of each step."""

    def fate_of(self, ordinal: int) -> Fate | None:
        """What becomes of the `ordinal`-th step; None: nothing special."""
        ...


def faults(steps: int, *, all_fates: bool, first: int = 0) -> list[Fault]:
    """Return a fault at each of so many steps: one with each fate, or with the fates in turn."""
    fates = list(Fate)
    return [
        Fault(at, fate)
        for at in range(1, steps + 1)
        for fate in (fates if all_fates else [fates[(first + at) % len(fates)]])
    ]


def may_clean_up(fault: Fault, names: Sequence[str]) -> bool:
    """Tell whether a process that meets the fault can drop the uploads that it began.

    Not if it dies, nor if it was never told the id of one, nor if dropping it is what fails.
    """
    name = names[fault.at - 1]
    if fault.fate is Fate.LOSE_ANSWER:
        return name != "start_multipart"
    return not fault.fate.kills and name != "abort_multipart"


class Killed(BaseException):
    """The process is no more: whatever it still tries has no effect."""


Hook = Callable[[Step], Awaitable[None]]


async def _no_hook(_step: Step) -> None:
    """Look at nothing."""


class Steps:
    """All steps of one process. Make it on the event loop that the process runs on."""

    def __init__(self, fates: Fates | None = None, hook: Hook = _no_hook) -> None:
        self._fates = fates
        self._hook = hook
        self._looking = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self.names: list[str] = []
        self.is_dead = False
        self.died = asyncio.Event()

    def made(self, name: str, call: Callable[[], ResultT]) -> ResultT:
        """Make a blocking step, from a thread that is not the loop's."""
        ordinal, fate = self._enter(name)
        self._show(Step(ordinal, name, done=False))
        if fate is Fate.FAIL:
            raise StoreUnavailableError(f"step {ordinal}, {name}, fails as it was told to")
        if fate is Fate.KILL_BEFORE:
            self.die()
        result = call()
        self._show(Step(ordinal, name, done=True))
        self._leave(fate)
        if fate is Fate.LOSE_ANSWER:
            raise StoreUnavailableError(f"step {ordinal}, {name}, loses its answer")
        return result

    async def awaited(self, name: str, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Make a step that is an RPC; if it fails, it does as when the connection breaks."""
        ordinal, fate = self._enter(name)
        await self._look(Step(ordinal, name, done=False))
        if fate is Fate.FAIL:
            raise broken_connection(f"step {ordinal}, {name}, fails as it was told to")
        if fate is Fate.KILL_BEFORE:
            self.die()
        result = await call()
        await self._look(Step(ordinal, name, done=True))
        self._leave(fate)
        if fate is Fate.LOSE_ANSWER:
            raise broken_connection(f"step {ordinal}, {name}, loses its answer")
        return result

    def heal(self) -> None:
        """Let nothing fail any more."""
        self._fates = None

    def die(self) -> None:
        """End the process here and now."""
        self.is_dead = True
        self._loop.call_soon_threadsafe(self.died.set)
        raise Killed

    async def live(self, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
        """Run a process to its end; None if it was killed."""
        living = asyncio.ensure_future(work)
        dying = asyncio.ensure_future(self.died.wait())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait({living, dying}, return_when=asyncio.FIRST_COMPLETED)
                if self.is_dead:
                    living.cancel()
                    await asyncio.wait({living})
                    if not living.cancelled():
                        living.exception()  # nobody is left whom it concerns
                    return None
        finally:
            dying.cancel()
            living.cancel()
        return living.result()

    def _enter(self, name: str) -> tuple[int, Fate | None]:
        with self._lock:
            if self.is_dead:
                raise Killed
            self.names.append(name)
            ordinal = len(self.names)
            return ordinal, self._fates.fate_of(ordinal) if self._fates is not None else None

    def _leave(self, fate: Fate | None) -> None:
        if fate is Fate.KILL_AFTER:
            self.die()
        if self.is_dead:
            raise Killed

    async def _look(self, step: Step) -> None:
        """Run the hook: never two at a time, whatever the process does side by side."""
        async with self._looking:
            await self._hook(step)

    def _show(self, step: Step) -> None:
        """Run the hook on the loop, from a thread."""
        if self._hook is _no_hook:
            return
        assert threading.get_ident() != self._thread, f"{step.name} blocks the event loop"
        asyncio.run_coroutine_threadsafe(self._look(step), self._loop).result(PATIENCE_S)


def broken_connection(why: str) -> grpc.aio.AioRpcError:
    """Make what a call raises whose connection is reset."""
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=why
    )


class SteppedStore:
    """A store whose calls are steps of one process."""

    def __init__(self, store: ObjectStore, steps: Steps) -> None:
        self._store = store
        self._steps = steps

    def check(self) -> None:
        """See `ObjectStore.check`."""
        self._steps.made("check", self._store.check)

    def until(self, deadline: float) -> SteppedStore:
        """See `ObjectStore.until`."""
        return SteppedStore(self._store.until(deadline), self._steps)

    def metrics(self) -> StoreMetrics:
        """See `ObjectStore.metrics`."""
        return self._store.metrics()

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, tags: Tags | None = None
    ) -> None:
        """See `ObjectStore.put`."""
        self._steps.made("put", lambda: self._store.put(key, data, if_absent=if_absent, tags=tags))

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """See `ObjectStore.get_range`."""
        return self._steps.made("get_range", lambda: self._store.get_range(key, start, end))

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        """See `ObjectStore.read_into`."""
        return self._steps.made("get_range", lambda: self._store.read_into(key, start, into))

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return self._steps.made("head", lambda: self._store.head(key))

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list_objects`."""
        found = self._steps.made(
            "list_objects", lambda: list(self._store.list_objects(prefix, start_after))
        )
        return iter(found)

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        """See `ObjectStore.delete_many`."""
        return self._steps.made("delete_many", lambda: self._store.delete_many(keys))

    def start_multipart(self, key: str, *, tags: Tags | None = None) -> MultipartUpload:
        """See `ObjectStore.start_multipart`."""
        return self._steps.made(
            "start_multipart", lambda: self._store.start_multipart(key, tags=tags)
        )

    def upload_part(self, upload: MultipartUpload, number: int, data: Body) -> UploadedPart:
        """See `ObjectStore.upload_part`."""
        return self._steps.made(
            "upload_part", lambda: self._store.upload_part(upload, number, data)
        )

    def copy_part(
        self, upload: MultipartUpload, number: int, source_key: str, start: int, end: int
    ) -> UploadedPart:
        """See `ObjectStore.copy_part`."""
        return self._steps.made(
            "copy_part",
            lambda: self._store.copy_part(upload, number, source_key, start, end),
        )

    def complete_multipart(self, upload: MultipartUpload, parts: Sequence[UploadedPart]) -> None:
        """See `ObjectStore.complete_multipart`."""
        self._steps.made(
            "complete_multipart", lambda: self._store.complete_multipart(upload, parts)
        )

    def abort_multipart(self, upload: MultipartUpload) -> None:
        """See `ObjectStore.abort_multipart`."""
        self._steps.made("abort_multipart", lambda: self._store.abort_multipart(upload))

    def list_multipart_uploads(self, prefix: str = "") -> Iterator[MultipartUpload]:
        """See `ObjectStore.list_multipart_uploads`."""
        found = self._steps.made(
            "list_multipart_uploads", lambda: list(self._store.list_multipart_uploads(prefix))
        )
        return iter(found)

    def close(self) -> None:
        """See `ObjectStore.close`."""


class DirectContext:
    """What a servicer is told of a call without a network; ending the call raises in the caller."""

    def time_remaining(self) -> float | None:
        """No deadline."""
        return None

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """Nothing is sent along."""
        return ()

    def set_trailing_metadata(self, trailer: object) -> None:
        """Nobody reads it."""

    async def abort(
        self, code: grpc.StatusCode, message: str, trailer: Sequence[tuple[str, Any]] = ()
    ) -> None:
        """End the call with a status."""
        raise grpc.aio.AioRpcError(
            code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), details=message
        )


Handler = Callable[[bytes, Any], Awaitable[Any]]


class DirectChannel:
    """A connection to handlers in the same process; each call is a step."""

    def __init__(self, handlers: Mapping[str, Handler], steps: Steps) -> None:
        self._handlers = handlers
        self._steps = steps

    def unary_unary(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
    ) -> Callable[..., Awaitable[Any]]:
        """Return what calls the handler of `path`."""
        handler = self._handlers[path]

        async def send(request: Any, timeout: float | None = None) -> Any:
            data = request_serializer(request)
            answer = await self._steps.awaited(
                path.rpartition("/")[2], lambda: handler(data, DirectContext())
            )
            return response_deserializer(answer.SerializeToString())

        return send

    async def close(self) -> None:
        """Nothing is held."""
