"""The partitions without leaders that a broker serves, and one watch of all their streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from streammeta.brokers.kafka.diskless.partition import DisklessPartition
from streammeta.brokers.partition.errors import PartitionError
from streammeta.brokers.partition.log import LogConfig
from streammeta.client import EntityChange, StreamClient, errors

FILTERED_MAX = 1_000
"""Number of streams above which the watch has no filter."""

_PAUSE_S = 1.0

_log = logging.getLogger(__name__)

Place = tuple[str, int]
"""Topic id and partition."""


class DisklessPartitions:
    """Partitions by topic id and partition. `configure` adds and removes them."""

    def __init__(self, client: StreamClient) -> None:
        self._client = client
        self._partitions: dict[Place, DisklessPartition] = {}
        self._renewed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._partitions)

    def get(self, place: Place) -> DisklessPartition | None:
        """Return a partition, None if its topic or its stream is not known here."""
        return self._partitions.get(place)

    def configure(self, wanted: Mapping[Place, tuple[int, LogConfig]]) -> None:
        """Serve exactly these partitions, with these stream ids and settings."""
        gone = self._partitions.keys() - wanted.keys()
        new = wanted.keys() - self._partitions.keys()
        for place in gone:
            # Waiting reads notice that the partition is gone.
            self._partitions.pop(place).note_change()
        for place, (stream_id, config) in wanted.items():
            if place in new:
                self._partitions[place] = DisklessPartition(self._client, stream_id, config)
            self._partitions[place].config = config
        if gone or new:
            self._renewed.set()

    async def retain(self, places: Iterable[Place]) -> None:
        """Apply retention to some partitions."""
        for place in places:
            partition = self.get(place)
            if partition is None:
                continue
            try:
                await partition.retain()
            except (errors.BrokerClientError, PartitionError, errors.StorageError) as error:
                _log.warning(
                    "retention of %s-%d failed, retrying at the next round: %s", *place, error
                )

    async def follow(self) -> None:
        """Inform partitions of changes of their streams, until cancelled.

        While the watch fails, reads at the end of a partition look the end up.
        """
        while True:
            try:
                await self._follow_once()
                continue
            except errors.BrokerClientError as error:
                _log.warning("watching shared streams failed, retrying: %s", error)
            except Exception:  # noqa: BLE001 - consumers wait for news all the same
                _log.exception("watching shared streams failed unexpectedly, retrying")
            await asyncio.sleep(_PAUSE_S)

    async def _follow_once(self) -> None:
        """Follow the present partitions until there are others."""
        self._renewed.clear()
        followed = {partition.stream_id: partition for partition in self._partitions.values()}
        renewed = asyncio.create_task(self._renewed.wait())
        tasks: list[asyncio.Task[object]] = [renewed]
        if followed:
            tasks.append(asyncio.create_task(self._watch(followed)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for partition in followed.values():
                partition.is_followed = False
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _watch(self, followed: Mapping[int, DisklessPartition]) -> None:
        stream_ids = sorted(followed) if len(followed) <= FILTERED_MAX else ()
        async with self._client.watch(["stream"], stream_ids=stream_ids) as changes:
            for partition in followed.values():
                partition.is_followed = True
                partition.note_change()  # covers changes before the watch
            async for change in changes:
                found = followed.get(change.id) if isinstance(change, EntityChange) else None
                if found is not None:
                    found.note_change()
