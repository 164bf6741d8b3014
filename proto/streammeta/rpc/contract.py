"""Services of the contract, as descriptors by name. No other module lists them."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor

from streammeta.v1 import (
    admin_pb2,
    kv_pb2,
    metadata_pb2,
    nodes_pb2,
    objects_pb2,
    quorum_pb2,
    streams_pb2,
)

_FILES: tuple[FileDescriptor, ...] = (
    admin_pb2.DESCRIPTOR,
    kv_pb2.DESCRIPTOR,
    metadata_pb2.DESCRIPTOR,
    nodes_pb2.DESCRIPTOR,
    objects_pb2.DESCRIPTOR,
    quorum_pb2.DESCRIPTOR,
    streams_pb2.DESCRIPTOR,
)

SERVICES: Mapping[str, ServiceDescriptor] = {
    name: service for file in _FILES for name, service in file.services_by_name.items()
}
"""Services by their names, such as `KVService`."""
