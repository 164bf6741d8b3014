"""The client without an event loop, for scripts, notebooks and forked workers.

The names equal those in `streammeta.client`, without `await`: every call blocks. The clients run on
an event loop in a thread of their own. A process that was forked from one with a client can't use
that client, but may open one if its parent never did.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import wraps
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, overload

from streammeta.client.api import key_values, shared_stream, stream, stream_client, watch
from streammeta.client.api.client_config import StreamClientConfig
from streammeta.client.errors import ClientClosedError, ForkedProcessError
from streammeta.client.nodes.session import Tags
from streammeta.client.resources.resources import warn_unclosed
from streammeta.client.resources.tally import ClientMetrics
from streammeta.client.writing.shared_batches import Producer
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.tls.files import TlsFiles

Params = ParamSpec("Params")
PartT = TypeVar("PartT")
PartT_co = TypeVar("PartT_co", covariant=True)
ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")


class _LoopThread:
    """An event loop in a daemon thread, for the calls of all threads of its process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._has_begun = threading.Event()
        self._is_closed = False
        # A daemon: an abandoned client does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="streammeta-client", daemon=True)
        self._thread.start()
        self._has_begun.wait()

    def _run(self) -> None:
        # At its end the runner cancels the tasks that are left, and ends the loop's threads.
        with asyncio.Runner() as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._has_begun.set()
        await self._end.wait()

    @property
    def is_open(self) -> bool:
        """True in the process that made it, until `close`."""
        return not self._is_closed and self._pid == os.getpid()

    def run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a call on the loop and wait for it. An interrupt cancels the call."""
        try:
            if self._pid != os.getpid():
                raise ForkedProcessError("call of a client of the parent process")
            if self._is_closed:
                raise ClientClosedError("call of a client")
            if threading.current_thread() is self._thread:
                raise RuntimeError(
                    "a callback of the client must not call it: it would wait for itself"
                )
        except BaseException:
            call.close()
            raise
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the loop and its thread."""
        if self.is_open:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()


class _Facade(Generic[PartT_co]):
    """A part of a client, and the loop on which it runs."""

    def __init__(self, loop: _LoopThread, part: PartT_co) -> None:
        self._loop = loop
        self._part = part


def _blocking(
    method: Callable[Concatenate[PartT, Params], Coroutine[Any, Any, ResultT]],
) -> Callable[Concatenate[_Facade[PartT], Params], ResultT]:
    """Return a coroutine method as one that blocks, with its parameters and docstring."""

    @wraps(method)
    def call(self: _Facade[PartT], /, *args: Params.args, **kwargs: Params.kwargs) -> ResultT:
        # By name: a subclass of the part has its own method.
        own: Callable[Params, Coroutine[Any, Any, ResultT]] = getattr(self._part, method.__name__)
        return self._loop.run(own(*args, **kwargs))

    return call


class Iteration(_Facade[AsyncIterator[ItemT]], Iterator[ItemT]):
    """An iterator over items that arrive. It is a context manager, or `close` it."""

    def __next__(self) -> ItemT:
        try:
            return self._loop.run(_next(self._part))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        # A watch begins here, so that state that is read afterwards has all earlier changes.
        if isinstance(self._part, watch.Watch):
            self._loop.run(self._part.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        if self._loop.is_open:
            # Generators have `aclose`, tails and watches `close`.
            close = getattr(self._part, "aclose", None) or self._part.close  # type: ignore[attr-defined]
            self._loop.run(_await(close()))


async def _next(items: AsyncIterator[ItemT]) -> ItemT:
    return await anext(items)


async def _await(call: Any) -> None:
    await call


class KeyValues(_Facade[key_values.KeyValues]):
    """The keys of a cluster. See `streammeta.client.KeyValues`."""

    get = _blocking(key_values.KeyValues.get)
    get_many = _blocking(key_values.KeyValues.get_many)
    put = _blocking(key_values.KeyValues.put)
    put_many = _blocking(key_values.KeyValues.put_many)
    delete = _blocking(key_values.KeyValues.delete)
    delete_many = _blocking(key_values.KeyValues.delete_many)

    def list(self, prefix: str = "", *, namespace: str = "") -> Iteration[key_values.KeyValue]:
        """List keys with a prefix, and their values, in key order."""
        return Iteration(self._loop, self._part.list(prefix, namespace=namespace))


class Stream(_Facade[stream.Stream]):
    """One stream of a client. See `streammeta.client.Stream`."""

    append = _blocking(stream.Stream.append)
    read = _blocking(stream.Stream.read)
    offset_at = _blocking(stream.Stream.offset_at)
    describe = _blocking(stream.Stream.describe)
    trim = _blocking(stream.Stream.trim)
    close = _blocking(stream.Stream.close)
    delete = _blocking(stream.Stream.delete)

    @property
    def id(self) -> int:
        """The stream's id."""
        return self._part.id

    @property
    def tags(self) -> Mapping[str, str]:
        """The tags it was created with, empty if they were not looked up."""
        return self._part.tags

    @property
    def epoch(self) -> int | None:
        """The epoch with which this client has the stream open, None if it has not."""
        return self._part.epoch

    @property
    def next_offset(self) -> int:
        """The offset of the next append."""
        return self._part.next_offset

    def __repr__(self) -> str:
        return repr(self._part)

    def iterate(self, start: int | None = None, end: int | None = None) -> Iteration[RecordBatch]:
        """Iterate over committed records from `start` (None: the first visible one) to `end`.

        Without `end` it stops at the end of the committed records when the iteration begins.
        """
        return Iteration(self._loop, self._part.iterate(start, end))

    def __iter__(self) -> Iterator[RecordBatch]:
        return self.iterate()

    def follow(self, offset: int) -> Iteration[RecordBatch]:
        """Iterate from `offset` on without an end, waiting for new records."""
        return Iteration(self._loop, self._part.follow(offset))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedStream(Stream):
    """One shared stream of a client. See `streammeta.client.SharedStream`."""

    _part: shared_stream.SharedStream

    def append(
        self,
        record: bytes | Sequence[bytes],
        count: int = 1,
        *,
        producer: Producer | None = None,
        timestamp_ms: int | None = None,
        max_timestamp_ms: int | None = None,
    ) -> int:
        """Append a record of `count` offsets, or a sequence of records. Return the first offset."""
        return self._loop.run(
            self._part.append(
                record,
                count,
                producer=producer,
                timestamp_ms=timestamp_ms,
                max_timestamp_ms=max_timestamp_ms,
            )
        )


def _handle(loop: _LoopThread, of: stream.Stream) -> Stream:
    """Return the handle of the same kind."""
    kind = SharedStream if isinstance(of, shared_stream.SharedStream) else Stream
    return kind(loop, of)


class StreamClient(_Facade[stream_client.StreamClient]):
    """A client of one cluster that blocks. Create it with `open`, and `close` it.

    Safe for calls of many threads. Raises as `streammeta.client.StreamClient`, `ClientClosedError`
    after `close`, and `ForkedProcessError` in a forked process. An interrupt (Ctrl-C) cancels the
    call and leaves the client usable.
    """

    close_streams = _blocking(stream_client.StreamClient.close_streams)
    compact = _blocking(stream_client.StreamClient.compact)
    create_streams = _blocking(stream_client.StreamClient.create_streams)
    delete_streams = _blocking(stream_client.StreamClient.delete_streams)
    flush = _blocking(stream_client.StreamClient.flush)
    open_streams = _blocking(stream_client.StreamClient.open_streams)
    trim_streams = _blocking(stream_client.StreamClient.trim_streams)

    @classmethod
    def open(
        cls,
        endpoints: Sequence[str],
        bucket: str | ObjectStore,
        *,
        node_id: int | None = None,
        node_epoch: int | None = None,
        tags: Tags | None = None,
        tls: TlsFiles | None = None,
        config: StreamClientConfig | None = None,
    ) -> Self:
        """Connect to the controllers and the bucket. See `streammeta.client.StreamClient.open`."""
        loop = _LoopThread()
        opening = stream_client.StreamClient.open(
            endpoints,
            bucket,
            node_id=node_id,
            node_epoch=node_epoch,
            tags=tags,
            tls=tls,
            config=config,
        )
        try:
            return cls(loop, loop.run(opening))
        except BaseException:
            loop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._loop.is_open:
            warn_unclosed(self, "its threads and connections", "use `with StreamClient.open(...)`")

    def close(self, *, close_streams: bool = False) -> None:
        """Upload and commit the appended records, then stop. A second call does nothing."""
        if self._loop.is_open:
            try:
                self._loop.run(self._part.close(close_streams=close_streams))
            finally:
                self._loop.close()

    @property
    def kv(self) -> KeyValues:
        """Keys and values that the brokers of the cluster share."""
        return KeyValues(self._loop, self._part.kv)

    def metrics(self) -> ClientMetrics:
        """Return this client's counters."""
        return self._part.metrics()

    @overload
    def create_stream(
        self, tags: Tags | None = None, /, *, shared: Literal[False] = False, **more: str
    ) -> Stream: ...
    @overload
    def create_stream(
        self, tags: Tags | None = None, /, *, shared: Literal[True], **more: str
    ) -> SharedStream: ...
    def create_stream(
        self, tags: Tags | None = None, /, *, shared: bool = False, **more: str
    ) -> Stream:
        """Create a stream with these tags and open it: `create_stream(topic="orders")`.

        With `shared` the stream needs no open, and every broker may append to it.
        """
        all_tags = {**(tags or {}), **more}
        # The overloads differ in the kind of the result alone.
        made: Coroutine[Any, Any, stream.Stream] = (
            self._part.create_stream(all_tags, shared=True)
            if shared
            else self._part.create_stream(all_tags)
        )
        return _handle(self._loop, self._loop.run(made))

    def find_streams(self, tags: Tags | None = None, /, **more: str) -> list[Stream]:
        """Return the streams that have all of these tags, by id: `find_streams(topic="orders")`."""
        found = self._loop.run(self._part.find_streams(tags, **more))
        return [_handle(self._loop, handle) for handle in found]

    def open_stream(self, stream_id: int) -> Stream:
        """Open a stream for this node, under its next epoch, and accept appends to it."""
        return Stream(self._loop, self._loop.run(self._part.open_stream(stream_id)))

    @overload
    def stream(self, stream_id: int, *, shared: Literal[False] = False) -> Stream: ...
    @overload
    def stream(self, stream_id: int, *, shared: Literal[True]) -> SharedStream: ...
    def stream(self, stream_id: int, *, shared: bool = False) -> Stream:
        """Return the handle of a stream without a call, for example to read it.

        Only a handle with `shared` can append to a shared stream.
        """
        if shared:
            return _handle(self._loop, self._part.stream(stream_id, shared=True))
        return _handle(self._loop, self._part.stream(stream_id))

    def watch(
        self,
        kinds: Collection[watch.ChangeKind] = (),
        *,
        stream_ids: Sequence[int] = (),
        key_prefixes: Iterable[tuple[str, str]] = (),
        from_offset: int | None = None,
    ) -> Iteration[watch.EntityChange | watch.KeyChange]:
        """Iterate over changes of the metadata. See `streammeta.client.StreamClient.watch`."""
        changes = self._part.watch(
            kinds, stream_ids=stream_ids, key_prefixes=key_prefixes, from_offset=from_offset
        )
        return Iteration(self._loop, changes)
