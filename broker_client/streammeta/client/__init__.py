"""The broker's client: write records into objects, register them with the controllers, read them.

Start with `async with StreamClient.open(...) as client` and `client.create_stream()`, which returns
a `Stream`. Parts can be used separately. Those that need I/O are opened by `await X.open(...)` or
`async with X.open(...)`, all others by their constructors. All parts are async context managers
with an idempotent `await x.close()`, except a session, which has no resources. Durations are
seconds and end in `_s`, times are ms since 1970 and end in `_ms`.
"""

import typing as _typing

from streammeta.client.api.client_config import StreamClientConfig as StreamClientConfig
from streammeta.client.api.key_values import KeyValue as KeyValue
from streammeta.client.api.key_values import KeyValues as KeyValues
from streammeta.client.api.named_objects import NamedObject as NamedObject
from streammeta.client.api.named_objects import NamedObjects as NamedObjects
from streammeta.client.api.named_objects import OwnerKey as OwnerKey
from streammeta.client.api.named_objects import OwnerStream as OwnerStream
from streammeta.client.api.shared_stream import SharedStream as SharedStream
from streammeta.client.api.stream import Stream as Stream
from streammeta.client.api.stream_client import NodeCompaction as NodeCompaction
from streammeta.client.api.stream_client import StreamClient as StreamClient
from streammeta.client.api.watch import EntityChange as EntityChange
from streammeta.client.api.watch import KeyChange as KeyChange
from streammeta.client.api.watch import Watch as Watch
from streammeta.client.commits.effects import PutResult as PutResult
from streammeta.client.commits.effects import ValueToPut as ValueToPut
from streammeta.client.compaction.config import CompactionConfig as CompactionConfig
from streammeta.client.compaction.report import CompactionReport as CompactionReport
from streammeta.client.compaction.report import GroupReport as GroupReport
from streammeta.client.config import ReaderConfig as ReaderConfig
from streammeta.client.config import ReaderStats as ReaderStats
from streammeta.client.config import SilentObserver as SilentObserver
from streammeta.client.config import UploadObserver as UploadObserver
from streammeta.client.config import WriterConfig as WriterConfig
from streammeta.client.deprecations import find_renamed
from streammeta.client.model import ClusterDescription as ClusterDescription
from streammeta.client.model import NodeDescription as NodeDescription
from streammeta.client.model import NodeIdentity as NodeIdentity
from streammeta.client.model import StreamDescription as StreamDescription
from streammeta.client.model import StreamObject as StreamObject
from streammeta.client.model import StreamRange as StreamRange
from streammeta.client.model import StreamSetObject as StreamSetObject
from streammeta.client.nodes.session import OpenedStream as OpenedStream
from streammeta.client.nodes.session import Outcomes as Outcomes
from streammeta.client.reading.metadata_follower import StreamTail as StreamTail
from streammeta.client.reading.range_reader import Fetched as Fetched
from streammeta.client.reading.time_lookup import OffsetAtTime as OffsetAtTime
from streammeta.client.reading.time_lookup import kafka_timestamp as kafka_timestamp
from streammeta.client.resources.tally import ClientMetrics as ClientMetrics
from streammeta.client.resources.tally import TimesSeen as TimesSeen
from streammeta.client.wal.bucket.config import ObjectLogConfig as ObjectLogConfig
from streammeta.client.wal.bucket.failover import FailoverReport as FailoverReport
from streammeta.client.wal.disk.config import LogConfig as LogConfig
from streammeta.client.wal.disk.recovery import RecoveryReport as RecoveryReport
from streammeta.client.writing.shared_batches import Producer as Producer
from streammeta.storage.object_format.record import RecordBatch as RecordBatch
from streammeta.tls.files import TlsFiles as TlsFiles

if not _typing.TYPE_CHECKING:  # for type checkers former names do not exist

    def __getattr__(name: str) -> object:
        """Return what a former name stands for. See `deprecations`."""
        return find_renamed(__name__, name)
