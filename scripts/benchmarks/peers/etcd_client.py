"""The commit on etcd: a Txn.

It compares each stream's value, puts the new one, and puts the object with the ranges as its value.
The client is gRPC. Requests are encoded once by hand, from etcd's `rpc.proto`, and only what
changes is filled in; field numbers stand beside the names.
"""

import time
from typing import Any

import grpc

from scripts.benchmarks.committer import Load, LoadError, SlotStreams, own_streams
from scripts.benchmarks.peers.template import Template
from scripts.benchmarks.protobuf_bytes import fields, length_delimited, number, varint
from streammeta.rpc.connections import client_channel

TXN = "/etcdserverpb.KV/Txn"
PUT = "/etcdserverpb.KV/Put"
STATUS = "/etcdserverpb.Maintenance/Status"
_COMPARE, _SUCCESS = 1, 2  # of TxnRequest
_TARGET, _KEY, _VALUE = 2, 3, 7  # of Compare
_TARGET_VALUE = 3
_REQUEST_PUT = 2  # of RequestOp
_SUCCEEDED = 2  # of TxnResponse
_MEMBER_ID, _LEADER = 2, 4  # of ResponseHeader and of StatusResponse
KEYS_A_TXN = 1_000
ID_DIGITS = 10


class EtcdCommitter:
    """Commits by Txn over one connection."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._root = f"b{time.monotonic_ns():x}"
        self._slots = own_streams(load)
        self._templates: list[Template] = []
        self._next_object_id = 1_000_000_000

    @property
    def object_folder(self) -> bytes:
        """What the keys of this load's objects begin with."""
        return f"{self._root}/o/".encode()

    async def open(self) -> None:
        """Connect and put the values of all streams."""
        self.channel = client_channel(self._load.endpoint)
        self._txn: Any = self.channel.unary_unary(TXN)
        ids = [each for slot in self._slots for each in slot.ids]
        for at in range(0, len(ids), KEYS_A_TXN):
            puts = [
                length_delimited(_SUCCESS, _put(self._stream_key(each), bytes(8)))
                for each in ids[at : at + KEYS_A_TXN]
            ]
            await self._call(b"".join(puts))
        self._templates = [self._template(slot) for slot in self._slots]

    async def close(self) -> None:
        """Drop the connection."""
        await self.channel.close()

    async def _call(self, request: bytes) -> bytes:
        try:
            answer: bytes = await self._txn(request)
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"etcd answered a Txn: {error.details()}") from error
        return answer

    async def commit(self, slot: int) -> None:
        """Make the next commit of a slot."""
        streams = self._slots[slot]
        starts, ends = streams.columns()
        object_id, self._next_object_id = self._next_object_id, self._next_object_id + 1
        request = self._templates[slot].fill(
            start=starts[:8], end=ends[:8], object_id=b"%010d" % object_id, ranges=starts + ends
        )
        if not fields(await self._call(request)).get(_SUCCEEDED):
            raise LoadError("etcd answered a Txn: a stream's value was not the one compared")
        streams.advance()

    def _stream_key(self, stream_id: int) -> bytes:
        return f"{self._root}/s/{stream_id}".encode()

    def _template(self, slot: SlotStreams) -> Template:
        template = Template()
        for stream_id in slot.ids:
            compare = number(_TARGET, _TARGET_VALUE) + length_delimited(
                _KEY, self._stream_key(stream_id)
            )
            template.add(_head(_COMPARE, len(compare) + 10) + compare + _head(_VALUE, 8))
            template.hole("start", 8)
        for stream_id in slot.ids:
            put = _put(self._stream_key(stream_id), bytes(8))
            template.add(length_delimited(_SUCCESS, put)[:-8])
            template.hole("end", 8)
        ids = b"".join(stream_id.to_bytes(8, "little") for stream_id in slot.ids)
        folder = self.object_folder
        value = 3 * len(ids)
        put_size = _size(1, len(folder) + ID_DIGITS) + _size(2, value)
        template.add(_head(_SUCCESS, _size(_REQUEST_PUT, put_size)))
        template.add(_head(_REQUEST_PUT, put_size))
        template.add(_head(1, len(folder) + ID_DIGITS) + folder)
        template.hole("object_id", ID_DIGITS)
        template.add(_head(2, value) + ids)
        template.hole("ranges", 2 * len(ids))
        return template


async def is_leader(endpoint: str) -> bool:
    """Whether the member at `endpoint` leads.

    Raises:
        OSError: it does not answer (yet).
    """
    async with client_channel(endpoint) as channel:
        try:
            ask: Any = channel.unary_unary(STATUS)
            status = fields(await ask(b""))
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"etcd answered Status: {error.details()}") from error
    header = status[1]
    assert isinstance(header, bytes)
    return fields(header).get(_MEMBER_ID) == status.get(_LEADER, 0)


def put_request(key: bytes, value: bytes) -> bytes:
    """Return PutRequest."""
    return length_delimited(1, key) + length_delimited(2, value)


def _put(key: bytes, value: bytes) -> bytes:
    """Return RequestOp of a put."""
    return length_delimited(_REQUEST_PUT, put_request(key, value))


def _head(field: int, size: int) -> bytes:
    return varint(field << 3 | 2) + varint(size)


def _size(field: int, size: int) -> int:
    return len(_head(field, size)) + size
