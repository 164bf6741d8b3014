"""Write-ahead log of a broker in the bucket: slots created in parallel, acknowledged in order.

Owns the timer that closes a slot, the uploads in flight, and the logs of the node's earlier
processes. Those are sealed and read when this one is opened, discarded when all their records are
settled, and swept by a later process. Another process that seals this log ends it. The queue
decides when a slot is uploaded.

Every later recovery reads every acknowledged record: its slot was created while there was no seal,
now or before, in its place or below it. `ack_lease` decides when that needs a check.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping

from streammeta.client import errors
from streammeta.client.arguments import check_kind, check_store
from streammeta.client.resources.opening import opening
from streammeta.client.resources.resources import ClosedAtExit, ignore_failure, warn_unclosed
from streammeta.client.wal.bucket import reading, sweeping
from streammeta.client.wal.bucket.ack_lease import AckLease, elapsed_s
from streammeta.client.wal.bucket.bucket_slots import BucketSlots, SlotStore
from streammeta.client.wal.bucket.config import ObjectLogConfig
from streammeta.client.wal.bucket.reading import (
    FoundLog,
    SealedLog,
    delete_leftovers,
    delete_slots,
    discard_log,
    list_logs,
    read_log,
    seal_log,
)
from streammeta.client.wal.bucket.setting_aside import write_aside
from streammeta.client.wal.bucket.slot_queue import SlotGroup, SlotQueue, SlotUpload
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import CorruptObjectError, StorageError, StoreUnavailableError
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE, RecordBatch
from streammeta.storage.object_log import slot as slot_format
from streammeta.storage.object_log.slot import LogName
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.storage.object_store.protocol.patience import Patience

_DELETED_AT_ONCE = 64
"""Number of past slots that starts a deletion. Closing the log deletes the rest."""

_MAX_SLOT = 2**30
"""Bytes of the largest slot."""

_PATIENCE = Patience(Backoff(0.05, 5.0, jitter=0))

_log = logging.getLogger(__name__)

_Ack = asyncio.Future[None]


class ObjectLog(ClosedAtExit):
    """An open log. Create it with `open`, use it from that event loop, and `close` it.

    Positions count records. The records of earlier processes' logs come first, up to
    `recovered_end`, then the records appended here, up to `end`. Records below `trimmed` are
    settled. `slots` counts the slots of records that this process stored, `slot_bytes` their bytes.
    """

    def __init__(
        self,
        slots: SlotStore,
        queue: SlotQueue[_Ack],
        config: ObjectLogConfig,
        former: list[SealedLog],
        recovered: list[RecordBatch],
        lease: AckLease,
        clock: Callable[[], float],
    ) -> None:
        self._slots = slots
        self._queue = queue
        self._config = config
        self._former = former
        self._recovered = recovered
        self._lease = lease
        self._clock = clock
        self._recovered_bytes = sum(record.encoded_size for record in recovered)
        self._loop = asyncio.get_running_loop()
        self._me = slot_format.Sealer(queue.log.node_id, queue.log.node_epoch)
        self.recovered_end = len(recovered)
        self._timer: asyncio.TimerHandle | None = None
        self._uploads: set[asyncio.Task[None]] = set()
        self._cleaning: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        # Slot 0 is the claim. It stays until the log is swept.
        self._deleted_below = 1
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended: errors.WriteAheadLogError | None = None
        self._is_closed = False
        self.slots = 0
        self.slot_bytes = 0

    @classmethod
    @opening
    async def open(
        cls, store: ObjectStore, identity: LogIdentity, config: ObjectLogConfig | None = None
    ) -> ObjectLog:
        """Create the log of a process. Seal and read the logs of the node's earlier processes.

        Their records stay in memory until they are trimmed.

        Raises:
            WrongLogError: a newer process of the node, or one of the same epoch, has a log.
            UnfitStoreError: the store lets two processes create the same object.
            DamagedSlotError: a slot of an earlier process is missing or has changed.
            StorageError: the store failed.
        """
        check_store(store)
        check_kind("identity", identity, LogIdentity, "a LogIdentity")
        bounds = ObjectLogConfig() if config is None else config
        check_kind("config", bounds, ObjectLogConfig, "an ObjectLogConfig, or None for defaults")

        slots = BucketSlots(store, bounds.parallel_uploads + 1)
        try:
            return await cls.open_in(
                slots, identity, bounds, secrets.token_bytes(slot_format.LOG_ID_SIZE)
            )
        except BaseException:
            slots.close()
            raise

    @classmethod
    async def open_in(
        cls,
        slots: SlotStore,
        identity: LogIdentity,
        config: ObjectLogConfig,
        log_id: bytes,
        clock: Callable[[], float] = elapsed_s,
    ) -> ObjectLog:
        """Open the log on a store of slots. `log_id` is random, 16 bytes. Raises as `open`.

        `clock` returns the seconds of a clock that never steps.
        """
        name = LogName(identity.namespace, identity.node_id, identity.node_epoch)
        lease = AckLease(clock())
        await _claim(slots, name, log_id)
        # The claim comes first: of two processes that start together, the older finds the newer.
        found = await _list_with_claim(slots, name)
        await _check_own_place(slots, name, found)
        me = slot_format.Sealer(name.node_id, name.node_epoch)
        former: list[SealedLog] = []
        records: list[RecordBatch] = []
        # In ascending order of epochs, so recovered records are in append order.
        for epoch, log in found.items():
            if epoch == name.node_epoch or log.is_recovered:
                continue
            sealed = await seal_log(slots, log.name, me)
            if sealed is not None:
                former.append(sealed)
                async for batch in read_log(slots, sealed):
                    records.extend(batch)
        await delete_leftovers(slots, (log for epoch, log in found.items() if epoch < max(found)))

        queue: SlotQueue[_Ack] = SlotQueue(name, log_id, config, len(records))
        # Recovered records count as positions of this log, and none of them is settled yet.
        queue.trimmed = 0
        log_opened = cls(slots, queue, config, former, records, lease, clock)
        log_opened._sweeping = asyncio.create_task(log_opened._sweep_later(found))
        if not records:
            log_opened._clean()
        return log_opened

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warn_unclosed(
                self,
                f"{self._queue.unflushed_bytes} bytes of the log {self._queue.log.prefix} were not"
                " in the bucket",
                "`await log.close()` after its writer was closed",
            )

    @property
    def end(self) -> int:
        """The position after the last appended record."""
        return self._queue.end

    @property
    def trimmed(self) -> int:
        """The position below which all records are settled."""
        return self._queue.trimmed

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are not trimmed, and of records that wait for a slot."""
        return self._queue.kept_bytes + self._recovered_bytes

    @property
    def max_bytes(self) -> int:
        """The configured size up to which the log accepts records."""
        return self._config.max_bytes

    @property
    def max_record_bytes(self) -> int:
        """The size of the largest encoded record that ever fits."""
        return min(self._config.max_bytes, _MAX_SLOT) - slot_format.SLOT_HEADER_SIZE

    def has_room(self, size: int) -> bool:
        """Return whether records of `size` encoded bytes may all be appended now.

        The answer changes from false to true only in `trim` and when a slot is stored. Zero bytes
        always fit. Raises the error that ended the log.
        """
        self._check_usable()
        # Recovered records are in the log already and need no space in it.
        if size == 0:
            return True
        queue, cost = self._queue, size + slot_format.SLOT_HEADER_SIZE
        unflushed = queue.unflushed_bytes
        # One record may exceed the limit if nothing else waits, or it could never be appended.
        if unflushed and unflushed + cost > self._config.max_unflushed_bytes:
            return False
        return self.used_bytes + cost <= self._config.max_bytes

    def append(self, header: bytes, payload: bytes) -> _Ack:
        """Add one encoded record, `header` and `payload`, to the open slot.

        The slot's records share the result. It is done when the slot and all slots before it are in
        the bucket. Wait for it through `asyncio.shield`. If the log ends, it fails with the error
        that ended the log, and the record may or may not be in the bucket. Ask `has_room` first.
        """
        self._check_usable()
        # A wrong length would make the slot unreadable, and with it every later recovery.
        if len(header) != RECORD_HEADER_SIZE or int.from_bytes(header[29:]) != len(payload):
            raise ValueError(
                f"header of {len(header)} bytes for a payload of {len(payload)}: expected"
                f" {RECORD_HEADER_SIZE} bytes that end with the payload's length"
            )

        group = self._queue.append((header, payload), self._loop.create_future())
        if group.count == 1:
            # Not every appender awaits the result, and the error is logged once, by `_end`.
            group.ack.add_done_callback(ignore_failure)
        self._idle.clear()
        if group.is_due:
            self._pump()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._config.linger_s, self._cut)
        return group.ack

    def trim(self, position: int) -> None:
        """Settle all records before `position`, so that they are not recovered.

        Their slots are deleted later. Raises `ValueError` for a position above `end`.
        """
        self._queue.trim(position)
        # Recovered records are trimmed together, after all of them are committed.
        if self._recovered_bytes and position >= self.recovered_end:
            self._recovered, self._recovered_bytes = [], 0
        self._clean()

    def recover(self) -> Iterator[RecordBatch]:
        """Yield the records of the node's earlier processes, in append order, until trimmed."""
        return iter(self._recovered)

    async def set_aside(self, records: Iterable[RecordBatch], reason: str) -> str | None:
        """Store records that can't be committed in a separate object and return its key.

        Returns None for no records. Raises `StorageError`, which does not end the log.
        """
        self._check_usable()
        return await write_aside(self._slots, self._queue.log, records, reason)

    async def flush(self) -> None:
        """Wait until all appended records are in the bucket, or the log has ended."""
        self._cut()
        await self._idle.wait()

    async def close(self) -> None:
        """Wait for the slots in flight. If all records are settled, leave only a seal.

        Records that are not in the bucket after `close_deadline_s` are dropped: they were never
        acknowledged.
        """
        if self._is_closed:
            return

        try:
            async with asyncio.timeout(self._config.close_deadline_s):
                await self.flush()
                if self._cleaning is not None:
                    await asyncio.wait([self._cleaning])
                if self._ended is None and self.trimmed == self.end:
                    await self._leave()
        except TimeoutError:
            _log.warning("the last records of log %s are not stored", self._queue.log.prefix)
        except StorageError as error:
            prefix = self._queue.log.prefix
            _log.warning("log %s is not sealed, the next process recovers it: %s", prefix, error)
        finally:
            self._is_closed = True
            self._end(errors.WriteAheadLogClosedError("the write-ahead log is closed"))
            others = (self._cleaning, self._sweeping)
            tasks = [*self._uploads, *(task for task in others if task is not None)]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            # Last: the cancelled tasks may still use the threads.
            self._slots.close()

    async def _leave(self) -> None:
        """Seal this log, which has no unsettled record, and delete its other slots."""
        queue = self._queue
        seal = queue.seal(slot_format.SlotKind.SEAL, slot_format.sealer_body(self._me))
        if await self._slots.create(queue.log.slot_key(seal.sequence), [seal.encode()]):
            await delete_slots(self._slots, queue.log, range(self._deleted_below, seal.sequence))

    # -- uploading

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _cut(self) -> None:
        """Upload the open slot when it has a turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._queue.cut()
        self._pump()

    def _pump(self) -> None:
        """Start the uploads that have a turn."""
        if self._ended is not None:
            return
        for upload in self._queue.take_uploads():
            task = self._loop.create_task(self._upload(upload))
            self._uploads.add(task)
            task.add_done_callback(self._uploads.discard)

    async def _upload(self, upload: SlotUpload) -> None:
        """Create one slot, retrying until it succeeds or the log ends."""
        attempt = 0
        self._lease.start(upload.sequence, self._clock())
        while self._ended is None:
            try:
                if await self._slots.create(upload.key, upload.pieces):
                    # A created slot proves that no seal was in its place, unless a sweep removed
                    # the seal. Within the lease no sweep can have done so. After it, the claim
                    # decides, because a sweep removes the claim first.
                    if self._lease.covers(self._clock()) or await self._has_claim():
                        self._complete(upload)
                    else:
                        self._end(errors.LogSweptError(self._queue.log.slot_key(0)))
                else:
                    self._end(
                        errors.LogSealedError(upload.key, await self._describe_sealer(upload.key))
                    )
                return
            except StorageError as error:
                wait = _PATIENCE.wait_s(error, attempt)
                if wait is None:
                    # A rejection that can't pass, such as a missing permission: records would never
                    # be durable.
                    self._end(errors.ObjectLogFailedError(upload.key, str(error)))
                    return
                _log.warning("slot %s failed, retrying in %g s: %s", upload.key, wait, error)

            await asyncio.sleep(wait)
            attempt += 1

    async def _has_claim(self) -> bool:
        """Return whether the claim exists: a sweep removes it before any seal."""
        key = self._queue.log.slot_key(0)
        data = await self._slots.get(key)
        try:
            if data is None:
                return False
            slot = slot_format.decode_slot(data, key, self._queue.log.namespace)
            return slot.log_id == self._queue.log_id
        except CorruptObjectError as error:
            raise StoreUnavailableError(f"the claim of this log can't be read: {error}") from error

    async def _describe_sealer(self, key: str) -> str:
        """Describe the owner of a slot, as far as it can be read."""
        try:
            data = await self._slots.get(key)
            if data is not None:
                slot = slot_format.decode_slot(data, key, self._queue.log.namespace)
                if slot.kind is slot_format.SlotKind.SEAL:
                    sealer = slot.sealer()
                    return f"process {sealer.node_epoch} of node {sealer.node_id}"
        except (StorageError, CorruptObjectError) as error:
            _log.warning("the owner of slot %s can't be read: %s", key, error)
        return "another process"

    def _complete(self, upload: SlotUpload) -> None:
        groups = self._queue.mark_stored(upload.sequence)
        self._lease.renew(self._queue.durable_below)
        for group in groups:
            self.slots += 1
            self.slot_bytes += group.size
            if not group.ack.done():
                group.ack.set_result(None)
        if self._queue.is_idle:
            self._idle.set()
        self._pump()
        self._clean()

    def _end(self, error: errors.WriteAheadLogError) -> None:
        """Accept no more records, and fail all that are not acknowledged."""
        if self._ended is not None:
            return
        if not self._is_closed:
            _log.error("the write-ahead log has ended: %s", error)
        self._ended = error
        if self._timer is not None:
            self._timer.cancel()
        groups: list[SlotGroup[_Ack]] = self._queue.drop()
        for group in groups:
            if not group.ack.done():
                group.ack.set_exception(error)
        self._idle.set()

    # -- deleting

    def _clean(self) -> None:
        """Start a deletion of past slots if there are enough. One deletion runs at a time."""
        # A log that has ended may belong to another process by now.
        if self._ended is not None or (self._cleaning is not None and not self._cleaning.done()):
            return
        # Former logs are needed until all their records are settled.
        is_discarding = bool(self._former) and not self._recovered
        if is_discarding or self._queue.past_below - self._deleted_below >= _DELETED_AT_ONCE:
            self._cleaning = self._loop.create_task(self._delete_past())

    async def _delete_past(self) -> None:
        """Discard former logs and delete past slots. The next deletion retries failures."""
        try:
            while self._former and not self._recovered:
                await discard_log(self._slots, self._former[0].name, self._me)
                # Only after the discard succeeded, so that a failure is retried.
                self._former.pop(0)
            below = self._queue.past_below
            await delete_slots(self._slots, self._queue.log, range(self._deleted_below, below))
            self._deleted_below = max(self._deleted_below, below)
        except StorageError as error:
            _log.warning("past slots are not deleted, retrying with the next ones: %s", error)

    async def _sweep_later(self, found: Mapping[int, FoundLog]) -> None:
        """Sweep logs of earlier processes after watching them for long enough."""
        # A stalled process must have the chance to notice its seal before the seal is removed.
        await asyncio.sleep(sweeping.WATCH_S)
        retention_ms = round(self._config.retention_s * 1000)
        try:
            await sweeping.sweep_logs(self._slots, self._queue.log, found, retention_ms)
        except StorageError as error:
            _log.warning("seals of earlier processes stay for the next process: %s", error)


async def _claim(slots: SlotStore, name: LogName, log_id: bytes) -> None:
    """Create the first slot, and use it to test that the store never creates an object twice.

    The claim stays until the log has a recovered mark, which reserves the epoch as well. It has the
    id of its process, so a retry after a lost answer succeeds.
    """
    key = name.slot_key(0)
    first = slot_format.Slot(name, log_id, 0, 0, 0, slot_format.SlotKind.RECORDS)
    if not await _create_again(slots, key, first.encode()):
        raise _epoch_in_use(name)
    # The second put must fail: a store that ignores its condition can't fence any process.
    # Different bytes, as `SlotStore.create` accepts an existing object with the same ones.
    other = slot_format.Slot(
        name, bytes(byte ^ 0xFF for byte in log_id), 0, 0, 0, slot_format.SlotKind.RECORDS
    )
    if await slots.create(key, [other.encode()]):
        raise errors.UnfitStoreError(key)


async def _create_again(slots: SlotStore, key: str, data: bytes) -> bool:
    """Create a slot, with retries: only this process can have created the same bytes before."""
    for attempt in range(reading.DOUBTS):
        try:
            return await slots.create(key, [data])
        except StoreUnavailableError as error:
            wait = reading.PAUSES.wait(attempt)
            _log.warning("creation of claim %s failed, retrying in %g s: %s", key, wait, error)
            await asyncio.sleep(wait)
    return await slots.create(key, [data])


async def _list_with_claim(slots: SlotStore, name: LogName) -> dict[int, FoundLog]:
    """List the node's logs. A listing without this process's claim is stale and is repeated."""
    for doubts in range(reading.DOUBTS + 1):
        found = await list_logs(slots, name.namespace, name.node_id)
        if name.node_epoch in found and 0 in found[name.node_epoch].sequences:
            return found
        await asyncio.sleep(reading.PAUSES.wait(doubts))
    raise StoreUnavailableError(
        f"listings do not show the claim {name.slot_key(0)}, which this process has created. Check"
        " the store, and start this process again"
    )


async def _check_own_place(slots: SlotStore, name: LogName, found: Mapping[int, FoundLog]) -> None:
    """Raise `WrongLogError` unless the log is the node's newest and contains only its claim."""
    if max(found) > name.node_epoch:
        raise errors.WrongLogError(
            f"node {name.node_id} has a write-ahead log of the newer process {max(found)}, this"
            f" one is {name.node_epoch}: stop it, or start it with a larger node epoch"
        )
    own = found[name.node_epoch]
    is_fresh = own.sequences == [0] and not own.is_recovered
    if not is_fresh or await slots.get(name.recovered_key) is not None:
        raise _epoch_in_use(name)


def _epoch_in_use(name: LogName) -> errors.WrongLogError:
    return errors.WrongLogError(
        f"the write-ahead log {name.prefix} already exists: a process of this epoch created it, or"
        f" another broker recovered it. Start this process with a node epoch above"
        f" {name.node_epoch}"
    )
