"""Tree of a copy of the metadata: the tree of a live cluster over metadata in memory.

So a checkpoint has the same directories, documents and names as the cluster. Facts that only a
leader knows are missing: sessions of nodes are UNKNOWN, and so is the namespace of object keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from streammeta.controller.ids import NONE_ID
from streammeta.controller.lifecycle.broker_sessions import NodeState
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.rpc.services.routes import LeaderView, Route, routes
from streammeta.rpc.blocking_client import Request, Response, UnaryMethod
from streammeta.shell.live_tree import tree_of
from streammeta.shell.state import MetadataCopy
from streammeta.shell.tree import Directory, Document, File, Value


def copy_tree(copy: MetadataCopy) -> Directory:
    """Return the root of the tree of a copy.

    Raises:
        DamagedMetadataError: its sections contradict each other.
    """
    cluster_metadata = ClusterMetadata.from_sections(
        _without_secrets(copy.sections), copy.end_offset
    )
    fields: tuple[tuple[str, Value], ...] = (
        ("cluster_id", copy.cluster_id),
        ("end_offset", copy.end_offset),
        ("feature_level", cluster_metadata.feature_level),
        *((name, count) for name, count in cluster_metadata.used().items()),
    )
    return tree_of(_MapCaller(copy.cluster_id, cluster_metadata), File(lambda: Document(fields)))


class _MapCaller:
    """Answers the requests of a tree from metadata in memory."""

    def __init__(self, cluster_id: str, cluster_metadata: ClusterMetadata) -> None:
        self._map = cluster_metadata
        view = LeaderView(lambda _: NodeState.UNKNOWN, lambda _: NONE_ID)
        # The leader's own routes, so that a copy answers exactly as a cluster does.
        self._routes = routes(cluster_id, view)

    def call(self, method: UnaryMethod[Request, Response], request: Request) -> Response:
        """See `live_tree.Caller`."""
        # A stub asks its channel for a function of each method. This one answers from memory.
        ask = cast(Callable[[Request], Response], method(cast(grpc.Channel, _Methods(self._ask))))
        return ask(request)

    def _ask(self, method: str, request: Message) -> Message:
        route: Route = self._routes[method]
        encoded = route.encode(self._map.query(route.decode(request)))
        if isinstance(encoded, Message):
            return encoded
        # The tree expects one message, also where the leader would stream several.
        whole = next(encoded)
        for piece in encoded:
            whole.MergeFrom(piece)
        return whole


class _Methods:
    """Channel for a stub: it creates a function for the path of each method."""

    def __init__(self, ask: Callable[[str, Message], Message]) -> None:
        self._ask = ask

    def unary_unary(self, path: str, *_: Any, **__: Any) -> Callable[[Message], Message]:
        # A stub names /package.Service/Method, a route package.Service.Method.
        method = path.removeprefix("/").replace("/", ".")
        return lambda request: self._ask(method, request)

    def unary_stream(self, path: str, *_: Any, **__: Any) -> str:
        """Return None, because the tree asks for no streams."""
        return path

    stream_unary = stream_stream = unary_stream


def _without_secrets(
    sections: Mapping[str, Mapping[str, Any]],
) -> Mapping[str, Mapping[str, Any]]:
    """Return the sections without configurations of write-ahead logs, which may contain secrets."""
    nodes = sections["nodes"]
    hidden = {**nodes, "wal_config": [""] * len(nodes["wal_config"])}
    return {name: hidden if name == "nodes" else sections[name] for name in sections}
