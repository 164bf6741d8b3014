"""The commit on etcd: a Txn.

It compares each stream's value, puts the new one, and puts the object with the ranges as its value.
The client is gRPC. Requests are encoded by hand, with the field numbers of etcd's `rpc.proto`.
"""

import time
from typing import Any

import grpc

from scripts.benchmarks.committer import Load, LoadError, SlotStreams, id_column, own_streams
from scripts.benchmarks.peers.template import Template
from scripts.benchmarks.protobuf_bytes import fields, length_delimited, number
from streammeta.rpc.connections import client_channel

TXN = "/etcdserverpb.KV/Txn"
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
        """Prefix of the keys of this load's objects."""
        return f"{self._root}/o/".encode()

    async def open(self) -> None:
        """Connect and put the values of all streams."""
        self.channel = client_channel(self._load.endpoint)
        self._txn: Any = self.channel.unary_unary(TXN)
        keys = [self._stream_key(stream_id) for slot in self._slots for stream_id in slot.ids]
        for at in range(0, len(keys), KEYS_A_TXN):
            puts = [_put(key, bytes(8)) for key in keys[at : at + KEYS_A_TXN]]
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
            raise LoadError("etcd rejected a Txn: a stream's value was not the expected one")
        streams.advance()

    def _stream_key(self, stream_id: int) -> bytes:
        return f"{self._root}/s/{stream_id}".encode()

    def _template(self, slot: SlotStreams) -> Template:
        keys = [self._stream_key(stream_id) for stream_id in slot.ids]

        def encode(start: bytes, end: bytes, object_id: bytes, ranges: bytes) -> bytes:
            target = number(_TARGET, _TARGET_VALUE)
            value = length_delimited(_VALUE, start)
            compares = [
                length_delimited(_COMPARE, target + length_delimited(_KEY, key) + value)
                for key in keys
            ]
            created = _put(self.object_folder + object_id, id_column(slot.ids) + ranges)
            return b"".join((*compares, *(_put(key, end) for key in keys), created))

        return Template(encode, start=8, end=8, object_id=ID_DIGITS, ranges=16 * len(slot.ids))


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


def _put(key: bytes, value: bytes) -> bytes:
    """Return a put as an operation of a Txn that succeeds."""
    request = length_delimited(1, key) + length_delimited(2, value)
    return length_delimited(_SUCCESS, length_delimited(_REQUEST_PUT, request))
