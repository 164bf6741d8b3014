"""Clients that write and read while the cluster is broken, and take down what they saw.

Two kinds: some put, get and delete a few keys, on conditions too; some commit objects to a few
streams, side by side, so that one of two that chose the same start offset must be refused. Owns no
judgement of what was seen.
"""

import asyncio
import itertools
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streammeta.client.controllers import methods
from streammeta.client.controllers.methods import Method, RequestT, ResponseT
from streammeta.v1 import common_pb2, kv_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.chaos.chaos_client import ChaosClient, NotDoneError, OutcomeUnknownError
from tests.linearizability import models
from tests.linearizability.history import Handle, Recorder, dump

DELETE_KVS = Method(kv_pb2.DeleteKVsRequest, kv_pb2.DeleteKVsResponse)
CALL_S = 5.0
"""How long a client goes on with one operation."""
SETTLED_S = 30.0
"""How long an operation may take before faults begin and after they end."""

_NODE = common_pb2.NodeIdentity(node_id=1001, node_epoch=1)
_STREAM_EPOCH = 1
_OBJECT_TTL_MS = 3_600_000
_OBJECTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class WorkloadSize:
    """How many clients on how many keys and streams, and seconds between a client's operations."""

    kv_clients: int = 6
    stream_clients: int = 3
    keys: int = 24
    streams: int = 3
    pause_s: float = 0.02


@dataclass(slots=True)
class Workload:
    """The clients of one run. All operations go into `kv` and `stream`, with times in ns."""

    endpoints: Mapping[int, str]
    seed: int
    size: WorkloadSize = WorkloadSize()
    kv: Recorder = field(default_factory=lambda: Recorder(time.monotonic_ns))
    stream: Recorder = field(default_factory=lambda: Recorder(time.monotonic_ns))
    counts: Counter[str] = field(default_factory=Counter)
    stream_ids: Sequence[int] = ()
    is_stopping: bool = False
    _values: "itertools.count[int]" = field(default_factory=itertools.count)
    _clients: list[ChaosClient] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        return [f"key-{number}" for number in range(self.size.keys)]

    async def prepare(self) -> None:
        """Register the writing node and open its streams; the cluster must be well."""
        client = self._client("prepare")
        registered = await client.call(
            methods.REGISTER_NODE, nodes_pb2.RegisterNodeRequest(node=_NODE), SETTLED_S
        )
        created = await client.call(
            methods.CREATE_STREAMS,
            streams_pb2.CreateStreamsRequest(
                request_id=f"chaos-{self.seed}",
                node=_NODE,
                streams=[streams_pb2.NewStream()] * self.size.streams,
            ),
            SETTLED_S,
        )
        opened = await client.call(
            methods.OPEN_STREAMS,
            streams_pb2.OpenStreamsRequest(
                node=_NODE,
                streams=[
                    streams_pb2.StreamToOpen(stream_id=stream_id, stream_epoch=_STREAM_EPOCH)
                    for stream_id in created.stream_ids
                ],
            ),
            SETTLED_S,
        )
        errors = {registered.error, created.error, *(stream.error for stream in opened.streams)}
        assert errors == {common_pb2.ERROR_CODE_NONE}, f"the streams could not be made: {errors}"
        self.stream_ids = tuple(created.stream_ids)

    def start(self) -> None:
        for number in range(self.size.kv_clients):
            kv_worker = _KVClient(self, f"kv-{number}")
            self._tasks.append(asyncio.create_task(kv_worker.run()))
        for number in range(self.size.stream_clients):
            stream_worker = _StreamClient(self, f"stream-{number}")
            self._tasks.append(asyncio.create_task(stream_worker.run()))

    async def stop(self) -> None:
        """Wait until every client has ended its operation; raise what ended one of them before."""
        self.is_stopping = True
        await asyncio.gather(*self._tasks)
        self._tasks.clear()

    def check_running(self) -> None:
        """Raise what ended a client, if anything did."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def read_everything(self) -> None:
        """Read every key and stream once more, linearizably; the cluster must be well."""
        kv_reader = _KVClient(self, "last-kv", within_s=SETTLED_S)
        for key in self.keys:
            await kv_reader.get(key)
        stream_reader = _StreamClient(self, "last-stream", within_s=SETTLED_S)
        await stream_reader.read_objects(self.stream_ids)

    def dump(self, folder: Path) -> None:
        """Write the histories to files that can be checked again."""
        dump(folder / "kv-history.jsonl", "kv", self.kv.history())
        dump(folder / "stream-history.jsonl", "stream", self.stream.history())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()

    def new_value(self) -> str:
        return f"v{next(self._values)}"

    def client_for(self, name: str) -> tuple[ChaosClient, random.Random]:
        """A client for one worker, and the worker's own source of chance."""
        return self._client(name), random.Random(f"{self.seed} {name}")

    def _client(self, name: str) -> ChaosClient:
        client = ChaosClient(self.endpoints, random.Random(f"{self.seed} {name} route"))
        self._clients.append(client)
        return client


class _Worker(ABC):
    """One client: an operation, a short pause, the next; each one taken down."""

    def __init__(self, workload: Workload, name: str, within_s: float = CALL_S) -> None:
        self.workload = workload
        self.name = name
        self.within_s = within_s
        self.client, self.rng = workload.client_for(name)

    async def run(self) -> None:
        """Work until the workload stops."""
        while not self.workload.is_stopping:
            await self.operate()
            await asyncio.sleep(self.workload.size.pause_s * self.rng.uniform(0.2, 1.8))

    @abstractmethod
    async def operate(self) -> None:
        """Do one operation, chosen by chance."""

    async def ask(
        self,
        recorder: Recorder,
        handles: Sequence[Handle],
        method: Method[RequestT, ResponseT],
        request: RequestT,
        *,
        may_repeat: bool = True,
    ) -> ResponseT | None:
        """Send a request; None if no answer came, which is taken down."""
        try:
            return await self.client.call(method, request, self.within_s, may_repeat=may_repeat)
        except NotDoneError:
            self.workload.counts["failed"] += 1
            for handle in handles:
                recorder.fail(handle)
        except OutcomeUnknownError:
            self.workload.counts["ambiguous"] += 1
            for handle in handles:
                recorder.ambiguous(handle)
        return None


class _KVClient(_Worker):
    async def operate(self) -> None:
        key = self.rng.choice(self.workload.keys)
        chance = self.rng.random()
        if chance < 0.35:
            await self.get(key)
        elif chance < 0.65:
            await self.put(key, models.Put(self.workload.new_value()))
        elif chance < 0.72:
            await self.put(key, models.Put(self.workload.new_value(), overwrite=False))
        elif chance < 0.90:
            await self._compare_and_set(key)
        else:
            await self._delete(key, models.Delete())

    async def get(self, key: str) -> models.KVAnswer | None:
        """Read a key; None if no answer came."""
        request = kv_pb2.GetKVsRequest(keys=[kv_pb2.KVKey(key=key)])
        return await self._ask_kv(key, models.Get(), methods.GET_KVS, request)

    async def put(self, key: str, put: models.Put) -> None:
        """Write a key, at most once."""
        item = kv_pb2.KVToPut(key=key, value=put.value.encode(), overwrite=put.overwrite)
        if put.expected_version is not None:
            item.expected_version = put.expected_version
        request = kv_pb2.PutKVsRequest(request_id=put.value, items=[item])
        await self._ask_kv(key, put, methods.PUT_KVS, request, may_repeat=False)

    async def _compare_and_set(self, key: str) -> None:
        """Read a key, then change it, by a put or a deletion, only if no other has."""
        seen = await self.get(key)
        if seen is None:
            return
        if seen.version and self.rng.random() < 0.25:
            await self._delete(key, models.Delete(seen.version))
        else:
            await self.put(key, models.Put(self.workload.new_value(), seen.version))

    async def _delete(self, key: str, delete: models.Delete) -> None:
        item = kv_pb2.KVKey(key=key)
        if delete.expected_version is not None:
            item.expected_version = delete.expected_version
        request = kv_pb2.DeleteKVsRequest(request_id=self.workload.new_value(), keys=[item])
        await self._ask_kv(key, delete, DELETE_KVS, request, may_repeat=False)

    async def _ask_kv(
        self,
        key: str,
        asked: models.Get | models.Put | models.Delete,
        method: Method[RequestT, Any],
        request: RequestT,
        *,
        may_repeat: bool = True,
    ) -> models.KVAnswer | None:
        """Send a request about one key and take down what came of it."""
        handle = self.workload.kv.invoke(self.name, key, asked)
        response = await self.ask(
            self.workload.kv, [handle], method, request, may_repeat=may_repeat
        )
        if response is None:
            return None
        result = response.results[0]
        answer = models.KVAnswer(
            applied=result.error == common_pb2.ERROR_CODE_NONE,
            value=result.value.decode() if result.found else None,
            version=result.version,
        )
        self.workload.kv.complete(handle, answer)
        self.workload.counts["acknowledged"] += 1
        return answer


class _StreamClient(_Worker):
    """Commits objects at the end of streams, as it last saw it, and asks where that is."""

    def __init__(self, workload: Workload, name: str, within_s: float = CALL_S) -> None:
        super().__init__(workload, name, within_s)
        self._ends = dict.fromkeys(workload.stream_ids, 0)

    async def operate(self) -> None:
        if self.rng.random() < 0.25:
            await self._read_end(self.rng.choice(list(self._ends)))
        else:
            count = self.rng.randint(1, len(self._ends))
            await self._commit(sorted(self.rng.sample(list(self._ends), count)))

    async def read_objects(self, stream_ids: Sequence[int]) -> None:
        """Ask which objects hold streams, all at one moment."""
        request = objects_pb2.GetObjectsRequest(
            queries=[
                objects_pb2.ObjectQuery(stream_id=stream_id, start_offset=0, limit=_OBJECTS_MAX)
                for stream_id in stream_ids
            ]
        )
        handles = [
            self.workload.stream.invoke(self.name, str(stream_id), models.ReadObjects())
            for stream_id in stream_ids
        ]
        answer = await self.ask(self.workload.stream, handles, methods.GET_OBJECTS, request)
        if answer is None:
            return
        for handle, found in zip(handles, answer.results, strict=True):
            assert found.error == common_pb2.ERROR_CODE_NONE, (
                f"objects of streams {stream_ids}: {found}"
            )
            self._complete(handle, models.Objects(tuple(item.object_id for item in found.objects)))

    async def _read_end(self, stream_id: int) -> None:
        request = streams_pb2.DescribeStreamsRequest(stream_ids=[stream_id])
        handle = self.workload.stream.invoke(self.name, str(stream_id), models.ReadEnd())
        answer = await self.ask(self.workload.stream, [handle], methods.DESCRIBE_STREAMS, request)
        if answer is None:
            return
        self._ends[stream_id] = answer.streams[0].end_offset
        self._complete(handle, models.End(answer.streams[0].end_offset))

    async def _commit(self, stream_ids: Sequence[int]) -> None:
        """Commit one object that continues each of these streams."""
        object_id = await self._prepare()
        if object_id is None:
            return
        ranges = {
            stream_id: models.CommitRange(
                object_id, self._ends[stream_id], self._ends[stream_id] + self.rng.randint(1, 9)
            )
            for stream_id in stream_ids
        }
        request = _commit_request(object_id, ranges)
        handles = [
            self.workload.stream.invoke(self.name, str(stream_id), wanted)
            for stream_id, wanted in ranges.items()
        ]
        commit = methods.COMMIT_STREAM_SET_OBJECT
        answer = await self.ask(self.workload.stream, handles, commit, request)
        if answer is None:
            return
        self._take_verdicts(handles, ranges, answer)
        for stream_id, verdict in zip(ranges, answer.range_errors, strict=True):
            if verdict != common_pb2.ERROR_CODE_NONE:
                await self._read_end(stream_id)

    def _take_verdicts(
        self,
        handles: Sequence[Handle],
        ranges: Mapping[int, models.CommitRange],
        answer: objects_pb2.CommitStreamSetObjectResponse,
    ) -> None:
        """Take down an answered commit: of a refused one only the ranges that were at fault."""
        accepted = answer.error == common_pb2.ERROR_CODE_NONE
        for handle, stream_id, verdict in zip(handles, ranges, answer.range_errors, strict=True):
            if accepted:
                assert verdict == common_pb2.ERROR_CODE_NONE, f"a commit with a bad range: {answer}"
                self._ends[stream_id] = ranges[stream_id].end
                self._complete(handle, models.Committed())
            elif verdict == common_pb2.ERROR_CODE_OFFSET_NOT_MATCHED:
                self._complete(handle, models.NotAtEnd())
            else:
                assert verdict == common_pb2.ERROR_CODE_NONE, f"a commit was refused: {answer}"
                self.workload.stream.fail(handle)

    async def _prepare(self) -> int | None:
        request = objects_pb2.PrepareObjectsRequest(
            request_id=f"prepare-{self.workload.new_value()}",
            node=_NODE,
            count=1,
            ttl_ms=_OBJECT_TTL_MS,
        )
        try:
            answer = await self.client.call(methods.PREPARE_OBJECTS, request, self.within_s)
        except (NotDoneError, OutcomeUnknownError):
            self.workload.counts["failed"] += 1
            return None
        assert answer.error == common_pb2.ERROR_CODE_NONE, f"no object id was issued: {answer}"
        return answer.first_object_id

    def _complete(
        self,
        handle: Handle,
        answer: models.Committed | models.NotAtEnd | models.End | models.Objects,
    ) -> None:
        self.workload.stream.complete(handle, answer)
        self.workload.counts["acknowledged"] += 1


def _commit_request(
    object_id: int, ranges: Mapping[int, models.CommitRange]
) -> objects_pb2.CommitStreamSetObjectRequest:
    return objects_pb2.CommitStreamSetObjectRequest(
        node=_NODE,
        object_id=object_id,
        order_id=object_id,
        object_size=1,
        ranges=objects_pb2.RangeColumns(
            stream_id=ranges.keys(),
            stream_epoch=[_STREAM_EPOCH] * len(ranges),
            start_offset=[wanted.start for wanted in ranges.values()],
            end_offset=[wanted.end for wanted in ranges.values()],
        ),
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
    )
