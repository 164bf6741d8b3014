"""A client of Kafka's protocol for tests: trees are asked, entities of `kio` come back."""

from __future__ import annotations

import io
import socket
from collections.abc import Mapping
from typing import Any

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from streammeta.brokers.kafka.protocol.wire import entity_of

Tree = Mapping[str, Any]


def framed(body: bytes) -> bytes:
    """Return a frame: a body behind its length."""
    return len(body).to_bytes(4, "big") + body


class WireClient:
    """One connection; `call` waits for the answer."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 30)
        self._correlation = 0

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, api_key: int, version: int, tree: Tree) -> Any:
        """Send a request, and return the answer."""
        self._correlation += 1
        self._socket.sendall(framed(request_bytes(api_key, version, tree, self._correlation)))
        frame = self._exactly(int.from_bytes(self._exactly(4), "big"))
        return read_answer(api_key, version, frame, self._correlation)

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            data = self._socket.recv(size - len(found))
            assert data, "the connection was closed"
            found += data
        return found


def read_answer(api_key: int, version: int, frame: bytes, correlation_id: int = 1) -> Any:
    """Read an answer without its length."""
    schema: Any = load_response_schema(api_key, version)
    header, size = entity_reader(schema.__header_schema__)(frame, 0)
    assert header.correlation_id == correlation_id
    return entity_reader(schema)(frame, size)[0]


def read_response(api_key: int, version: int, body: bytes) -> Any:
    """Read the body of an answer."""
    return entity_reader(load_response_schema(api_key, version))(body, 0)[0]


def request_bytes(api_key: int, version: int, tree: Tree, correlation_id: int = 1) -> bytes:
    """Return a request without its length."""
    schema: Any = load_request_schema(api_key, version)
    out = io.BytesIO()
    head = {
        "request_api_key": api_key,
        "request_api_version": version,
        "correlation_id": correlation_id,
        "client_id": "test",
    }
    entity_writer(schema.__header_schema__)(out, entity_of(schema.__header_schema__, head))
    entity_writer(schema)(out, entity_of(schema, tree))
    return out.getvalue()


def produce_tree(
    batches: Mapping[int, bytes], topic: str = "t", *, acks: int = -1, timeout_ms: int = 20_000
) -> Tree:
    """Return the tree of a Produce request with a batch for each partition."""
    rows = [{"index": partition, "records": records} for partition, records in batches.items()]
    return {
        "transactional_id": None,
        "acks": acks,
        "timeout": timeout_ms,
        "topic_data": [{"name": topic, "partition_data": rows}],
    }


def metadata_tree(*topics: str, creates: bool = True) -> Tree:
    """Return the tree of a Metadata request for some topics, or for all without any."""
    return {
        "topics": [{"name": name} for name in topics] or None,
        "allow_auto_topic_creation": creates,
        "include_cluster_authorized_operations": False,
        "include_topic_authorized_operations": False,
    }
