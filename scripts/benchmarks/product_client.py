"""The same commits through the product's own client: what it costs beside the small one."""

from typing import Any

import numpy as np

from scripts.benchmarks.committer import OBJECT_BYTES, STEP, Load, LoadError, SlotStreams
from scripts.benchmarks.http2 import Http2Connection
from scripts.benchmarks.streammeta_client import NODE_ID, PreparedIds, open_slots
from streammeta.client import ControllerClient, NodeIdentity
from streammeta.client.commit_messages import Upload
from streammeta.client.commit_pipeline import CommitPipeline
from streammeta.v1 import common_pb2


class ProductCommitter:
    """Uploads handed to `CommitPipeline`."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._slots: list[SlotStreams] = []

    async def open(self) -> None:
        """Register the node, create and open all streams, prepare the objects."""
        self._connection = await Http2Connection.connect(self._load.endpoint, self._load.tls)
        self._prepared = PreparedIds(self._connection)
        self._slots = [slot.streams for slot in await open_slots(self._connection, self._load)]
        await self._prepared.fetch(self._load.objects)
        options: dict[str, Any] = {} if self._load.tls is None else {"tls": self._load.tls}
        self._client = ControllerClient([self._load.endpoint], **options)
        node = NodeIdentity(NODE_ID, 1)
        self._pipeline = CommitPipeline(self._client, node)

    async def close(self) -> None:
        """Wait for what is under way and release the connections."""
        await self._pipeline.close()
        await self._client.close()
        self._connection.close()

    async def commit(self, slot: int) -> None:
        """Make the next commit of a slot."""
        streams = self._slots[slot]
        starts = np.full(len(streams.ids), streams.end_offset)
        upload = Upload(
            object_id=await self._prepared.next(),
            object_size=OBJECT_BYTES,
            stream_ids=streams.ids,
            start_offsets=starts.tolist(),
            end_offsets=(starts + STEP).tolist(),
            stream_epochs=[1] * len(streams.ids),
        )
        verdict = await (await self._pipeline.upload(upload))
        if verdict.error != common_pb2.ERROR_CODE_NONE:
            raise LoadError(f"CommitPipeline answered with error {verdict.error}")
        streams.advance()
