"""Native copies of ledgers: a copy is a closed stream, and an entry id is its offset.

A key for each stream names it and says whether the copy is whole. Only whole copies can be opened.
The key is put before the first entry is appended, completed after the stream is closed, and deleted
after the stream is deleted. A stream without a key is found by its tags. Knows nothing of lists.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streammeta.brokers.pulsar import offloader
from streammeta.brokers.pulsar.formats import read_errors
from streammeta.brokers.pulsar.formats.blocks import Entry
from streammeta.brokers.pulsar.formats.ledger_values import LedgerMetadata
from streammeta.brokers.pulsar.formats.object_names import data_name, ledger_id_of, uuid_of
from streammeta.client import StreamClient
from streammeta.client.errors import BrokerClientError, StreamNotFoundError
from streammeta.storage.parsing import parse_json

DRIVER = "streammeta-streams"
"""Name of native copies in the contexts of a ledger list."""
NAMESPACE = "_pulsar_copies"
"""Namespace of the keys of all native copies."""
MANAGED_LEDGER_TAG = "pulsar-managed-ledger"
COPY_TAG = "pulsar-copy"
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Copy:
    """Value of a copy's key. `metadata` is None until the copy is whole."""

    stream_id: int
    version: int
    metadata: LedgerMetadata | None
    extra: Mapping[str, str]


class LedgerStreams:
    """The native copies of one managed ledger, written by the node of a client.

    All calls also raise the client's errors of the node or of a stream. The stream of an unfinished
    copy can't be deleted while another node has it open.
    """

    def __init__(
        self, client: StreamClient, managed_ledger: str, *, is_appendable: bool = True
    ) -> None:
        self._client = client
        self._managed_ledger = managed_ledger
        self._strays: dict[tuple[int, str], list[int]] = {}
        self.is_appendable = is_appendable

    async def offload(
        self, ledger: offloader.LedgerSource, uuid: str, extra: Mapping[str, str]
    ) -> None:
        """Copy a closed ledger to a stream under a new uuid.

        Raises:
            NotAppendableError: this place only reads.
            ValueError: the ledger is open or empty, or its source returns wrong entries.
            BrokerClientError: the copy is not whole. It is deleted, unless that fails too.
        """
        if not self.is_appendable:
            raise offloader.NotAppendableError

        # Checked before the stream exists, so that a rejected ledger leaves no stream.
        offloader.check_offloadable(ledger)
        name = data_name(uuid, ledger.ledger_id)
        # A crash before the key is put leaves a stream that only its tags identify.
        tags = {MANAGED_LEDGER_TAG: self._managed_ledger, COPY_TAG: name}
        (stream_id,) = await self._client.create_streams([tags])
        try:
            version = await self._put(name, {"stream": stream_id}, 0)
            await self._fill(ledger, stream_id)
            value = {
                "stream": stream_id,
                "metadata": base64.b64encode(ledger.metadata.encode()).decode(),
                "extra": dict(extra),
            }
            # Metadata in the key marks the copy as whole.
            await self._put(name, value, version)
        except BaseException:
            # The key may be missing, so the stream is remembered for its deletion.
            self._strays.setdefault((ledger.ledger_id, uuid), []).append(stream_id)
            with contextlib.suppress(BrokerClientError):
                await self.delete(ledger.ledger_id, uuid)
            raise

    async def _fill(self, ledger: offloader.LedgerSource, stream_id: int) -> None:
        """Append all entries, and close the stream once they are committed."""
        (await self._client.open_streams({stream_id: 0})).require_all()
        writer, last = self._client.writer, ledger.metadata.last_entry
        appended: list[asyncio.Future[int]] = []
        first = 0

        while first <= last:
            entries = await offloader.read_entries(ledger, first)
            # The futures are awaited at the end, so that many batches are in flight.
            appended.append(await writer.append_many(stream_id, [entry.data for entry in entries]))
            first += len(entries)

        await writer.flush()
        for future in appended:
            # Raises the error of an append that was not committed.
            await future
        # A closed stream rejects entries of a replaced process.
        (await self._client.close_streams([stream_id])).require_all()

    async def open(self, ledger_id: int, uuid: str) -> StreamLedger:
        """Return a handle that reads a copy. Raise `NoSuchLedgerError` without a whole one."""
        # A key without metadata belongs to an offload in progress, or to one that failed.
        found = await self._find(data_name(uuid, ledger_id))
        if found is None or found.metadata is None:
            raise read_errors.NoSuchLedgerError(f"ledger {ledger_id} has no whole copy {uuid}")
        return StreamLedger(self._client, found.stream_id, found.metadata, found.extra)

    async def delete(self, ledger_id: int, uuid: str) -> None:
        """Delete a copy, whole or not. May be repeated."""
        name = data_name(uuid, ledger_id)
        found = await self._find(name)
        strays = self._strays.get((ledger_id, uuid), [])
        streams = [*strays, *([] if found is None else [found.stream_id])]
        # Streams are deleted before their key, so a failed deletion can be repeated.
        if streams:
            await self._delete_streams(streams)
        # Forgotten only after the deletion, which may fail and be repeated.
        self._strays.pop((ledger_id, uuid), None)
        if found is not None:
            await self._delete_key(name)

    async def list_copies(self) -> list[tuple[int, str]]:
        """Return ledger ids and uuids of all copies, whole or not.

        Lists all streams of the cluster, because streams can't be looked up by tag.
        """
        listed = self._client.kv.list(self._prefix, namespace=NAMESPACE)
        names = {pair.key[len(self._prefix) :]: None async for pair in listed}
        keyed = set(names)
        async for stream in self._client.controllers.describe_streams():
            name = stream.tags.get(COPY_TAG)
            # Streams without a key come from an interrupted offload.
            mine = stream.tags.get(MANAGED_LEDGER_TAG) == self._managed_ledger
            place = _place(name) if name is not None and mine and name not in keyed else None
            if place is not None and name is not None:
                names[name] = None
                strays = self._strays.setdefault(place, [])
                strays += [stream.stream_id] if stream.stream_id not in strays else []

        places = (_place(name) for name in names)
        return [place for place in places if place is not None]

    async def is_of(self, managed_ledger: str, ledger_id: int, uuid: str) -> bool:
        """Whether a listed copy is of the managed ledger. `list_copies` lists no others."""
        return True

    # -- streams

    async def _delete_streams(self, stream_ids: Sequence[int]) -> None:
        session = self._client.session
        # The writer must not append to a stream that is being deleted.
        self._client.writer.detach(stream_ids)
        described = self._client.controllers.describe_streams(stream_ids)
        there = {stream.stream_id: stream async for stream in described}
        opened = {
            stream_id: stream.epoch or 0 for stream_id, stream in there.items() if stream.is_open
        }
        (await session.close_streams(opened)).require_all()
        epochs = {stream_id: stream.epoch for stream_id, stream in there.items()}
        # Only closed streams can be deleted. Missing ones were deleted by an earlier attempt.
        (await session.delete_streams(epochs)).require_all()

    # -- keys

    @property
    def _prefix(self) -> str:
        return f"{self._managed_ledger}/"

    async def _find(self, name: str) -> _Copy | None:
        found = await self._client.kv.get(self._prefix + name, namespace=NAMESPACE)
        if found is None:
            return None
        value = parse_json(found.value)
        metadata = None

        if "metadata" in value:
            metadata = LedgerMetadata.decode(base64.b64decode(value["metadata"]))
        return _Copy(value["stream"], found.version, metadata, value.get("extra", {}))

    async def _put(self, name: str, value: Mapping[str, object], version: int) -> int:
        """Put the key if it has this version (0 means absent). Return the new version."""
        encoded = json.dumps(value, separators=(",", ":")).encode()
        return await self._client.kv.put(
            self._prefix + name, encoded, namespace=NAMESPACE, expected_version=version
        )

    async def _delete_key(self, name: str) -> None:
        await self._client.kv.delete(self._prefix + name, namespace=NAMESPACE)


class StreamLedger:
    """Handle that reads a native copy. `extra` comes from its offload."""

    def __init__(
        self,
        client: StreamClient,
        stream_id: int,
        metadata: LedgerMetadata,
        extra: Mapping[str, str],
    ) -> None:
        self._client = client
        self._stream_id = stream_id
        self.metadata = metadata
        self.extra = extra
        self.is_closed = False

    async def read(self, first: int, last: int) -> list[Entry]:
        """Return entries, both ends included.

        Raises:
            OffloadReadHandleClosedError: the handle is closed.
            IncorrectParameterError: the ledger does not have them all.
            NoSuchLedgerError: the copy was deleted. Entries in the client's cache are still
                returned.
        """
        if self.is_closed:
            raise read_errors.OffloadReadHandleClosedError(
                f"stream {self._stream_id} is closed. Open its ledger again"
            )

        if not 0 <= first <= last <= self.metadata.last_entry:
            raise read_errors.IncorrectParameterError(
                f"entries are {first}..{last}, expected some of 0..{self.metadata.last_entry}"
            )

        found: list[Entry] = []
        at = first
        while at <= last:
            try:
                records = await self._client.read(self._stream_id, at, last + 1, _READ_BYTES)
            except StreamNotFoundError as error:
                raise read_errors.NoSuchLedgerError(str(error)) from error
            found += [Entry(record.base_offset, bytes(record.payload)) for record in records]
            # A read returns at most `_READ_BYTES`, so it may end before `last`.
            at = found[-1].entry_id + 1

        return found

    def close(self) -> None:
        """Reject reads from now on."""
        self.is_closed = True


def _place(name: str) -> tuple[int, str] | None:
    """Return the ledger id and uuid in the name of a copy, None for other names."""
    ledger_id = ledger_id_of(name)
    uuid = uuid_of(name, ledger_id)
    return None if ledger_id is None or uuid is None else (ledger_id, uuid)
