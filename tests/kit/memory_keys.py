"""Controllers in memory for brokers: keys with versions, nodes, streams, and what was asked.

Answers as the contract says; `before` lets a test act as another broker just before a call, and
`more` are answers to further methods, by name.
While there is a `failure` every call raises it, and while `held` is not set every call waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from streammeta.client.controllers import methods
from streammeta.client.controllers.methods import Method
from streammeta.client.model import NodeDescription, node_description
from streammeta.v1 import common_pb2, kv_pb2, nodes_pb2, streams_pb2

_EXISTS, _NONE = common_pb2.ERROR_CODE_KEY_EXIST, common_pb2.ERROR_CODE_NONE


class MemoryControllers:
    """One map of keys, which several brokers may share."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.nodes: list[nodes_pb2.NodeDescription] = []
        self.opening: dict[int, Sequence[streams_pb2.GetOpeningStreamsResponse]] = {}
        self.described: list[Any] = []
        self.asked: list[Any] = []
        self.before: dict[str, Callable[[], None]] = {}
        self.failure: Exception | None = None
        self.held: asyncio.Event | None = None
        self.more: dict[str, Callable[[Any], Any]] = {}
        self._offset = 0

    def version(self, key: str) -> int:
        """Return the version of the one key with this name, 0 if it is absent."""
        return next((at for (_, name), (_, at) in self.stored.items() if name == key), 0)

    def names(self) -> set[str]:
        """Return the names of all keys."""
        return {name for _, name in self.stored}

    async def call(self, method: Method[Any, Any], request: Any) -> Any:
        """Answer a call."""
        await self._reach()
        hook = self.before.pop(method.name, None)
        if hook is not None:
            hook()
        self.asked.append(request)
        answers: Mapping[str, Callable[[Any], Any]] = {
            methods.PUT_KVS.name: self._put,
            methods.GET_KVS.name: self._get,
            methods.DELETE_KVS.name: self._delete,
            methods.CLOSE_STREAMS.name: lambda asked: streams_pb2.CloseStreamsResponse(
                errors=[_NONE] * len(asked.streams)
            ),
            methods.DELETE_STREAMS.name: lambda asked: streams_pb2.DeleteStreamsResponse(
                errors=[_NONE] * len(asked.streams)
            ),
            **self.more,
        }
        return answers[method.name](request)

    def apply(self, late: kv_pb2.PutKVsRequest) -> None:
        """Let a put take effect whose caller has gone."""
        self._put(late)

    async def pages(self, method: Method[Any, Any], request: Any) -> AsyncIterator[Any]:
        """Answer a listing."""
        await self._reach()
        self.asked.append(request)
        if method is methods.GET_OPENING_STREAMS:
            for answer in self.opening.get(request.node.node_id, ()):
                yield answer
            return
        entries = [
            kv_pb2.KVEntry(key=key, value=value, version=version)
            for (namespace, key), (value, version) in sorted(self.stored.items())
            if namespace == request.namespace and key.startswith(request.prefix)
        ]
        yield kv_pb2.ListKVsResponse(entries=entries)

    async def _reach(self) -> None:
        if self.held is not None:
            await self.held.wait()
        if self.failure is not None:
            raise self.failure

    async def describe_nodes(self) -> list[NodeDescription]:
        """List the nodes."""
        return [node_description(node) for node in self.nodes]

    async def describe_streams(self) -> AsyncIterator[Any]:
        """List the streams that a test has described."""
        for stream in self.described:
            yield stream

    def _put(self, request: kv_pb2.PutKVsRequest) -> kv_pb2.PutKVsResponse:
        return kv_pb2.PutKVsResponse(results=[self._put_item(item) for item in request.items])

    def _put_item(self, item: kv_pb2.KVToPut) -> kv_pb2.KVResult:
        at = item.namespace, item.key
        value, version = self.stored.get(at, (b"", 0))
        if item.HasField("expected_version"):
            may_put = version == item.expected_version
        else:
            may_put = item.overwrite or not version
        if not may_put:
            return kv_pb2.KVResult(error=_EXISTS, value=value, version=version, found=True)
        self._offset += 1
        self.stored[at] = item.value, self._offset
        return kv_pb2.KVResult(value=item.value, version=self._offset, found=True)

    def _get(self, request: kv_pb2.GetKVsRequest) -> kv_pb2.GetKVsResponse:
        results = []
        for key in request.keys:
            value, version = self.stored.get((key.namespace, key.key), (b"", 0))
            results.append(kv_pb2.KVResult(value=value, version=version, found=version > 0))
        return kv_pb2.GetKVsResponse(results=results)

    def _delete(self, request: kv_pb2.DeleteKVsRequest) -> kv_pb2.DeleteKVsResponse:
        return kv_pb2.DeleteKVsResponse(results=[self._delete_item(key) for key in request.keys])

    def _delete_item(self, key: kv_pb2.KVKey) -> kv_pb2.KVResult:
        at = key.namespace, key.key
        if at not in self.stored:
            return kv_pb2.KVResult(error=common_pb2.ERROR_CODE_KEY_NOT_EXIST)
        if key.HasField("expected_version") and self.stored[at][1] != key.expected_version:
            return kv_pb2.KVResult(error=_EXISTS)
        del self.stored[at]
        return kv_pb2.KVResult()
