"""Runs the steps of `scenarios.yaml` through the parts of the Python client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from streammeta.client import KeyChange, KeyValues, NamedObjects, OpenedStream, OwnerKey, Watch
from streammeta.client.controllers.methods import COMMIT_NAMED_OBJECTS, PREPARE_OBJECTS
from streammeta.client.errors import InvalidRequestError, RejectedError
from streammeta.client.model import node_message
from streammeta.client.parts import (
    BrokerSession,
    CommitPipeline,
    ControllerClient,
    StreamQuery,
    StreamReader,
    Upload,
)
from streammeta.v1 import admin_pb2, objects_pb2
from streammeta.v1.admin_pb2_grpc import AdminServiceStub
from streammeta.v1.common_pb2 import ErrorCode
from tests.kit.memory_store import MemoryObjectStore

Results = Mapping[str, Any]

_epochs = count(1)


async def run_scenario(endpoints: Sequence[str], scenario: Mapping[str, Any]) -> None:
    """Run all steps. Raises AssertionError at the first that has another outcome."""
    async with ControllerClient(endpoints) as client:
        runner = _Runner(client)
        for number, written in enumerate(scenario["steps"], 1):
            step = runner.resolve(written)
            results = await runner.outcome(step)
            expected = step.get("expect", {})
            where = f"{scenario['name']}: step {number}, {step}: {results}"
            assert "error" not in results or "error" in expected, where
            assert {name: results.get(name) for name in expected} == expected, where
            runner.saved |= {name: results[of] for name, of in step.get("save", {}).items()}


@dataclass
class _Runner:
    client: ControllerClient
    saved: dict[str, Any] = field(default_factory=dict)
    sessions: dict[object, BrokerSession] = field(default_factory=dict)
    owners: dict[int, tuple[BrokerSession, OpenedStream]] = field(default_factory=dict)

    def resolve(self, value: Any) -> Any:
        """Replace names by the values that were saved under them."""
        if isinstance(value, Mapping):
            return {key: self.resolve(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.resolve(item) for item in value]
        if not isinstance(value, str) or not value.startswith("$"):
            return value
        name, _, added = value[1:].partition(" + ")
        return self.saved[name] + int(added) if added else self.saved[name]

    async def outcome(self, step: Mapping[str, Any]) -> Results:
        """Return the results of a step, or the name of its error."""
        words = {name: item for name, item in step.items() if name not in ("do", "save", "expect")}
        try:
            return await getattr(self, "_" + step["do"])(**words) or {}
        except InvalidRequestError as error:
            return {"error": "INVALID_FIELD" if error.code is None else _name(error.code)}
        except RejectedError as error:
            if error.code is None:
                raise
            return {"error": _name(error.code)}

    async def _register(self, node: int, epoch: int = 0, **other: str) -> None:
        session = await BrokerSession.open(self.client, node, epoch or next(_epochs))
        self.sessions[other.get("as", node)] = session

    async def _heartbeat(self, node: int) -> None:
        await self.sessions[node].heartbeat()

    async def _create_stream(self, node: object, tags: Mapping[str, str]) -> Results:
        (stream_id,) = await self.sessions[node].create_streams([tags])
        return {"stream": stream_id}

    async def _open_stream(self, node: object, stream: int) -> Results:
        session = self.sessions[node]
        (described,) = [found async for found in self.client.describe_streams([stream])]
        epoch = 0 if described.epoch is None else described.epoch + 1
        opened = (await session.open_streams({stream: epoch})).require_all()[stream]
        self.owners[stream] = (session, opened)
        return {"start": opened.start_offset, "next": opened.next_offset}

    async def _close_stream(self, stream: int) -> None:
        session, opened = self.owners[stream]
        (await session.close_streams({stream: opened.epoch})).require_all()

    async def _delete_stream(self, stream: int) -> None:
        session, opened = self.owners[stream]
        (await session.delete_streams({stream: opened.epoch})).require_all()

    async def _trim(self, stream: int, start: int) -> Results:
        session, opened = self.owners[stream]
        trimmed = await session.trim_streams({stream: opened.epoch}, {stream: start})
        return {"start": trimmed.require_all()[stream]}

    async def _describe_stream(self, stream: int) -> Results:
        described = [found async for found in self.client.describe_streams([stream])]
        if not described:
            return {"error": "STREAM_NOT_EXIST"}
        (found,) = described
        return {
            "start": found.start_offset,
            "end": found.end_offset,
            "state": "OPENED" if found.is_open else "CLOSED",
            "node": found.node_id,
        }

    async def _find_streams(self, tags: Mapping[str, str]) -> Results:
        return {"streams": [found.stream_id async for found in self.client.find_streams(tags)]}

    async def _prepare(self, node: object, count: int) -> Results:
        request = PREPARE_OBJECTS.request(
            node=node_message(self.sessions[node].node), count=count, ttl_ms=60_000
        )
        answer = await self.client.call(PREPARE_OBJECTS, request)
        return {"error": _name(answer.error)} if answer.error else {"first": answer.first_object_id}

    async def _commit(
        self,
        node: object,
        object_id: int,
        size: int,
        ranges: list[list[int]],
    ) -> Results:
        stream_ids, starts, ends = zip(*ranges, strict=True)
        epochs = [self.owners[stream_id][1].epoch for stream_id in stream_ids]
        upload = Upload(object_id, size, stream_ids, starts, ends, epochs)
        async with CommitPipeline(self.client, self.sessions[node].node) as pipeline:
            verdict = await (await pipeline.upload(upload))
        return {"error": _name(verdict.error)} if verdict.error else {}

    async def _name_objects(
        self, node: object, prefix: str, count: int, namespace: str, key: str
    ) -> Results:
        first = (await self._prepare(node, count))["first"]
        owner = objects_pb2.OwnerKey(namespace=namespace, key=key)
        items = [
            objects_pb2.NamedObjectToCommit(
                object_id=first + number, name=f"{prefix}{number}", owner_key=owner
            )
            for number in range(count)
        ]
        for start in range(0, count, 1000):
            request = objects_pb2.CommitNamedObjectsRequest(
                node=node_message(self.sessions[node].node), objects=items[start : start + 1000]
            )
            answer = await self.client.call(COMMIT_NAMED_OBJECTS, request)
            if any(answer.errors):
                return {"error": _name(answer.errors[0])}
        return {}

    async def _delete_objects(
        self, node: object, namespace: str, key: str, with_key: bool
    ) -> Results:
        objects = NamedObjects(self.sessions[node], MemoryObjectStore())
        owner = OwnerKey(key, namespace)
        return {"key_deleted": await objects.delete_all_of(owner, with_owner_key=with_key)}

    async def _count_objects(self, node: object, prefix: str) -> Results:
        objects = NamedObjects(self.sessions[node], MemoryObjectStore())
        return {"count": len([found async for found in objects.describe(prefix=prefix)])}

    async def _objects(self, stream: int, start: int, end: int) -> Results:
        async with StreamReader(self.client, MemoryObjectStore(), "any") as reader:
            (located,) = await reader.locate([StreamQuery(stream, start, end)])
        if located.error is not None:
            raise located.error
        return {
            "objects": [
                [found.object_id, found.start_offset, found.end_offset] for found in located.slices
            ],
            "end": located.end_offset,
        }

    async def _put(
        self, namespace: str, key: str, value: str, version: int | None = None
    ) -> Results:
        keys = KeyValues(self.client)
        stored = await keys.put(key, value.encode(), namespace=namespace, expected_version=version)
        return {"version": stored}

    async def _get(self, namespace: str, key: str) -> Results:
        found = await KeyValues(self.client).get(key, namespace=namespace)
        if found is None:
            return {"value": None}
        return {"value": found.value.decode(), "version": found.version}

    async def _delete(self, namespace: str, key: str, version: int | None = None) -> None:
        await KeyValues(self.client).delete(key, namespace=namespace, expected_version=version)

    async def _list(self, namespace: str, prefix: str) -> Results:
        entries = KeyValues(self.client).list(prefix, namespace=namespace)
        return {"keys": [entry.key async for entry in entries]}

    async def _end_offset(self) -> Results:
        return {"offset": (await self.client.describe_cluster()).high_watermark}

    async def _watch_keys(self, namespace: str, prefix: str, count: int, **words: int) -> Results:
        changes: list[list[str | None]] = []
        async with Watch(
            self.client, ["key"], key_prefixes=[(namespace, prefix)], from_offset=words["from"]
        ) as watch:
            while len(changes) < count:
                change = await anext(watch)
                assert isinstance(change, KeyChange)
                value = None if change.value is None else change.value.decode()
                changes.append([change.key, value])
        return {"changes": changes}

    async def _move_leadership(self) -> None:
        await KeyValues(self.client).get("any")  # a linearizable read finds the leader
        leader = self.client.leader
        assert leader is not None
        stub: Any = AdminServiceStub(self.client.channel(leader))
        await stub.TransferLeadership(admin_pb2.TransferLeadershipRequest())


def _name(code: int) -> str:
    return ErrorCode.Name(ErrorCode.ValueType(code)).removeprefix("ERROR_CODE_")
