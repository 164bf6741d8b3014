"""What a process asks of the outside world, step by step: each can fail, lose its answer, or kill.

A step is one call of the object store or one attempt at an RPC. Before and after each of them a
test may look at the world, or change it. Knows neither compaction nor what the calls are about.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar, cast

import grpc

from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.storage.object_store.protocol.calls import StoreMetrics
from tests.kit.local_calls import LocalServices, Trailer

ResultT = TypeVar("ResultT")

PATIENCE_S = 60.0


class Fate(Enum):
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

    def die(self) -> None:
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
                        living.exception()  # no caller is left
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
    """A store whose calls are steps; `made` makes one, as `Steps.made` does."""

    def __init__(self, store: ObjectStore, made: Callable[[str, Callable[[], Any]], Any]) -> None:
        self._store = store
        self._made = made

    def until(self, deadline: float) -> ObjectStore:
        return stepped(self._store.until(deadline), self._made)

    def metrics(self) -> StoreMetrics:
        return self._store.metrics()

    def close(self) -> None:
        """See `ObjectStore.close`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def work(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            return iter(list(result)) if isinstance(result, Iterator) else result

        step = "get_range" if name == "read_into" else name
        return lambda *args, **kwargs: self._made(step, lambda: work(*args, **kwargs))


def stepped(store: ObjectStore, made: Callable[[str, Callable[[], Any]], Any]) -> ObjectStore:
    return cast(ObjectStore, SteppedStore(store, made))


@dataclass
class DirectCall:
    answered: Awaitable[tuple[bytes, Trailer]]
    response_deserializer: Callable[[bytes], Any]
    trailer: Trailer = ()

    def __await__(self) -> Generator[Any, None, Any]:
        data, self.trailer = yield from self.answered.__await__()
        return self.response_deserializer(data)

    async def trailing_metadata(self) -> Trailer:
        return self.trailer


class DirectChannel:
    """A connection to handlers in the same process; each call is a step."""

    def __init__(self, services: LocalServices, steps: Steps) -> None:
        self._services = services
        self._steps = steps

    def unary_unary(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
    ) -> Callable[..., Awaitable[Any]]:
        def send(request: Any, timeout: float | None = None, **_: Any) -> DirectCall:
            data, name = request_serializer(request), path.rpartition("/")[2]
            answered = self._steps.awaited(name, lambda: self._services.answer(path, data))
            return DirectCall(answered, response_deserializer)

        return send

    async def close(self) -> None:
        """Nothing is held."""
