"""Upload pool of a broker: commits of all queues' segments, in shared objects.

Owns admission by bytes, the open group, and one commit for each group. A commit moves the ends of
streams and puts the matching metadata, all or nothing. A rejected write leaves its group, and the
others are committed without it. The pool does not interpret messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from streammeta.client import OpenedStream, PutResult, StreamClient, ValueToPut
from streammeta.client.errors import ObjectExpiredError, rejection
from streammeta.client.parts import (
    BucketCheck,
    CommitPipeline,
    EffectsVerdict,
    ObjectIds,
    Upload,
    UploadWithEffects,
    run_blocking,
)
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.object_writer import ObjectWriter
from streammeta.storage.object_format.record import RecordBatch

# Object ids expire after this time. An upload with an expired id gets a new one.
_IDS_TTL_S = 600.0
_EXPIRED_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Bounds of the pool. A group is sent at `group_bytes` or after `linger_s`.

    Writes wait while the pool contains `max_bytes`. A larger write waits until the pool is empty.
    """

    linger_s: float = 0.25
    group_bytes: int = 8 << 20
    max_bytes: int = 64 << 20
    record_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        """Reject bounds that no write can meet."""
        for name in ("group_bytes", "max_bytes", "record_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.linger_s < 0:
            raise ValueError(f"linger_s is {self.linger_s}, expected 0 or more")


@dataclass(frozen=True, slots=True)
class PoolWrite:
    """Bytes of one segment from `position` on, and the metadata value that describes them."""

    stream: OpenedStream
    position: int
    data: bytes
    put: ValueToPut
    times: tuple[int, int]

    @property
    def end(self) -> int:
        """Position after the last byte."""
        return self.position + len(self.data)

    def records(self, record_bytes: int) -> list[RecordBatch]:
        """Return the bytes as records with one offset for each byte."""
        stream = self.stream
        pieces = range(0, len(self.data), record_bytes)
        return [
            RecordBatch(stream.stream_id, stream.epoch, self.position + at, len(piece), piece)
            for at in pieces
            if (piece := self.data[at : at + record_bytes])
        ]


@dataclass(slots=True, eq=False)
class _Waiting:
    write: PoolWrite
    done: asyncio.Future[PutResult] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class UploadPool:
    """Commits of one broker process. Call `close` at the end."""

    def __init__(self, client: StreamClient, config: PoolConfig | None = None) -> None:
        self._config = config or PoolConfig()
        session = client.session
        self._namespace = session.namespace
        self._store = client.store
        self._bucket = BucketCheck(client.controllers, client.store, session.namespace)
        self._ids = ObjectIds(session, _IDS_TTL_S)
        self._pipeline = CommitPipeline(client.controllers, session.node)
        self._waiting: list[_Waiting] = []
        self._held = 0
        self._room = asyncio.Condition()
        self._arrived = asyncio.Event()
        self._full = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.groups = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that are not committed yet: at most `max_bytes`, or one larger write."""
        return self._held

    async def write(self, write: PoolWrite) -> PutResult:
        """Commit bytes together with other writes. Return the result for the value.

        A stream has one write at a time. Raises `BrokerClientError` and `StorageError`. Unless the
        error is a `RejectedError`, the bytes may be committed all the same.
        """
        size = len(write.data)

        async with self._room:
            await self._room.wait_for(
                lambda: not self._held or self._held + size <= self._config.max_bytes
            )
            self._held += size
        waiting = _Waiting(write)
        try:
            self._waiting.append(waiting)
            self._arrived.set()
            if (
                sum(len(waiting.write.data) for waiting in self._waiting)
                >= self._config.group_bytes
            ):
                self._full.set()
            # Started by the first write, because the constructor has no running loop.
            if self._task is None:
                self._task = asyncio.create_task(self._run())
            return await waiting.done
        finally:
            # Also after a failure or a cancellation, so that the bytes are released.
            async with self._room:
                self._held -= size
                self._room.notify_all()

    async def close(self) -> None:
        """Stop. Uncommitted writes are cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for waiting in self._waiting:
            waiting.done.cancel()
        await self._pipeline.close(0)

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            # Wait for more writes to share the object, unless the group is full.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.linger_s):
                    await self._full.wait()

            group = self._take_group()
            try:
                await self._commit_group(group)
            except asyncio.CancelledError:
                for waiting in group:
                    # Cancelled callers must not wait for a commit that never comes.
                    waiting.done.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - every waiting write gets the error
                _fail(group, error)

    def _take_group(self) -> list[_Waiting]:
        """Remove the oldest writes from the queue: at least one, at most a group's bytes."""
        taken, size = 0, 0
        for waiting in self._waiting:
            if taken and size + len(waiting.write.data) > self._config.group_bytes:
                break
            size += len(waiting.write.data)
            taken += 1

        group, self._waiting = self._waiting[:taken], self._waiting[taken:]
        self._full.clear()
        if not self._waiting:
            self._arrived.clear()
        elif sum(len(waiting.write.data) for waiting in self._waiting) >= self._config.group_bytes:
            self._full.set()
        # Records of an object are sorted by stream.
        return sorted(group, key=lambda waiting: waiting.write.stream.stream_id)

    async def _commit_group(self, group: list[_Waiting]) -> None:
        """Commit a group. A rejected write fails alone, and the rest is committed again."""
        attempts = 0
        while group:
            self.groups += 1
            verdict = await self._commit([waiting.write for waiting in group])
            if not verdict.error:
                for waiting, result in zip(group, verdict.put_results, strict=True):
                    _answer(waiting, result)
                return
            refused = _find_refusals(verdict, len(group))

            # Without a rejected write the whole commit failed, for example on an expired object.
            if not any(refused):
                error = rejection(verdict.error, f"commit of {len(group)} segments")
                if not isinstance(error, ObjectExpiredError) or attempts >= _EXPIRED_ATTEMPTS:
                    raise error
                # The object was not committed in time. Discard the other old ids and upload again.
                attempts += 1
                self._ids.discard()
                continue

            for waiting, code in zip(group, refused, strict=True):
                if code:
                    _fail(
                        [waiting],
                        rejection(code, f"write to stream {waiting.write.stream.stream_id}"),
                    )
            group = [waiting for waiting, code in zip(group, refused, strict=True) if not code]

    async def _commit(self, writes: Sequence[PoolWrite]) -> EffectsVerdict:
        """Upload one object of all writes, and commit it with their values."""
        # Uploads to a wrong bucket would be lost, so it is checked first.
        await self._bucket.require()
        (object_id,) = (await self._ids.take(1)).ids

        writer = ObjectWriter(checksum=True)
        for write in writes:
            writer.write(write.records(self._config.record_bytes))
        writer.finish()
        data = b"".join(writer.parts())
        await run_blocking(self._store.put, key_for(object_id, self._namespace), data)

        crc32c = writer.summary.crc32c
        assert crc32c is not None
        upload = Upload(
            object_id=object_id,
            object_size=len(data),
            stream_ids=[write.stream.stream_id for write in writes],
            stream_epochs=[write.stream.epoch for write in writes],
            start_offsets=[write.position for write in writes],
            end_offsets=[write.end for write in writes],
            min_timestamp_ms=min(write.times[0] for write in writes),
            max_timestamp_ms=max(write.times[1] for write in writes),
            crc32c=crc32c,
        )

        asked = UploadWithEffects(upload, puts=[write.put for write in writes])
        return await (await self._pipeline.upload_with_effects(asked))


def _find_refusals(verdict: EffectsVerdict, count: int) -> list[int]:
    """Return each write's error, of its range or else of its value. 0 means no error."""
    ranges = list(verdict.range_errors) or [0] * count
    puts = [result.error for result in verdict.put_results] or [0] * count
    return [ranged or put for ranged, put in zip(ranges, puts, strict=True)]


def _answer(waiting: _Waiting, result: PutResult) -> None:
    if not waiting.done.done():
        waiting.done.set_result(result)


def _fail(group: Sequence[_Waiting], error: Exception) -> None:
    for waiting in group:
        if not waiting.done.done():
            waiting.done.set_exception(error)
