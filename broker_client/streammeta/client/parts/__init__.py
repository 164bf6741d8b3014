"""Parts of a client, for brokers that compose them, and for those that build their own objects.

`StreamClient` composes them, and its properties `controllers`, `session`, `writer` and `reader` are
such parts.
"""

from streammeta.client.commits.effects import EffectsVerdict as EffectsVerdict
from streammeta.client.commits.effects import StreamTrim as StreamTrim
from streammeta.client.commits.effects import UploadWithEffects as UploadWithEffects
from streammeta.client.commits.messages import Upload as Upload
from streammeta.client.commits.messages import UploadVerdict as UploadVerdict
from streammeta.client.commits.pipeline import CommitPipeline as CommitPipeline
from streammeta.client.controllers.bucket_check import BucketCheck as BucketCheck
from streammeta.client.controllers.controller_client import ControllerClient as ControllerClient
from streammeta.client.model import HeartbeatAnswer as HeartbeatAnswer
from streammeta.client.model import Recovery as Recovery
from streammeta.client.nodes.session import BrokerSession as BrokerSession
from streammeta.client.nodes.session import Heartbeat as Heartbeat
from streammeta.client.reading.lookups import Located as Located
from streammeta.client.reading.lookups import Slice as Slice
from streammeta.client.reading.lookups import StreamQuery as StreamQuery
from streammeta.client.reading.reader import StreamReader as StreamReader
from streammeta.client.resources.daemon_threads import run_blocking as run_blocking
from streammeta.client.wal.bucket.failover import FailoverWorker as FailoverWorker
from streammeta.client.wal.bucket.log import ObjectLog as ObjectLog
from streammeta.client.wal.bucket.setting_aside import read_aside as read_aside
from streammeta.client.wal.disk.config import LogIdentity as LogIdentity
from streammeta.client.wal.disk.log import WriteAheadLog as WriteAheadLog
from streammeta.client.wal.disk.recovery import AsideRun as AsideRun
from streammeta.client.wal.disk.set_aside import read_set_aside as read_set_aside
from streammeta.client.writing.object_ids import ObjectIds as ObjectIds
from streammeta.client.writing.shared_writer import SharedWriter as SharedWriter
from streammeta.client.writing.writer import StreamWriter as StreamWriter
from streammeta.storage.errors import Deviation as Deviation
