"""The same commits through the product's own client, to compare its cost with the small one's."""

from scripts.benchmarks.committer import OBJECT_BYTES, STEP, Load, LoadError, SlotStreams
from scripts.benchmarks.http2 import Http2Connection
from scripts.benchmarks.streammeta_client import NODE_ID, PreparedIds, open_slots
from streammeta.client import ControllerClient, NodeIdentity
from streammeta.client.commits.messages import Upload
from streammeta.client.commits.pipeline import CommitPipeline
from streammeta.v1 import common_pb2


class ProductCommitter:
    """Commits by the product's `CommitPipeline`."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._slots: list[SlotStreams] = []

    async def open(self) -> None:
        """Register the node, create and open all streams, prepare the objects."""
        self._connection = await Http2Connection.connect(self._load.endpoint, self._load.files)
        self._prepared = PreparedIds(self._connection)
        self._slots = [slot.streams for slot in await open_slots(self._connection, self._load)]
        await self._prepared.fetch(self._load.objects)
        self._client = ControllerClient([self._load.endpoint], tls=self._load.files)
        self._pipeline = CommitPipeline(self._client, NodeIdentity(NODE_ID, 1))

    async def close(self) -> None:
        """Wait for commits in flight and release the connections."""
        await self._pipeline.close()
        await self._client.close()
        self._connection.close()

    async def commit(self, slot: int) -> None:
        """Make the next commit of a slot."""
        streams = self._slots[slot]
        count, start = len(streams.ids), streams.end_offset
        upload = Upload(
            object_id=await self._prepared.next(),
            object_size=OBJECT_BYTES,
            stream_ids=streams.ids,
            start_offsets=[start] * count,
            end_offsets=[start + STEP] * count,
            stream_epochs=[1] * count,
        )
        result = await (await self._pipeline.upload(upload))
        if result.error != common_pb2.ERROR_CODE_NONE:
            raise LoadError(f"CommitPipeline answered with error {result.error}")
        streams.advance()
