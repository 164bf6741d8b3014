"""Requests and answers of Kafka's protocol: which are served, and their bytes by the library `kio`.

Answers are trees of dicts with the field names of the newest version; what an older version does
not have is left out, and what a tree leaves out is empty.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import struct
import typing
from collections.abc import Callable, Container, Mapping
from functools import cache
from typing import Any

from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.protocol.request_elements import (
    ELEMENTS_MAX,
    TooManyElementsError,
    count_elements,
    item_type,
)
from streammeta.storage.installation import optional_packages

with optional_packages("the Kafka-shaped broker"):
    from kio.index import load_request_schema, load_response_schema
    from kio.schema.errors import ErrorCode
    from kio.serial import entity_reader, entity_writer

METADATA, SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE = 3, 17, 18, 36

SERVED: Mapping[int, tuple[int, int]] = {
    0: (0, 8),  # Produce; 0 to 2 are named for old clients, which compress only then, and refused
    1: (4, 11),  # Fetch
    2: (1, 5),  # ListOffsets
    3: (0, 12),  # Metadata
    8: (2, 8),  # OffsetCommit
    9: (1, 8),  # OffsetFetch
    10: (0, 4),  # FindCoordinator
    11: (0, 5),  # JoinGroup
    12: (0, 3),  # Heartbeat
    13: (0, 4),  # LeaveGroup
    14: (0, 3),  # SyncGroup
    15: (0, 5),  # DescribeGroups
    16: (0, 4),  # ListGroups
    17: (0, 1),  # SaslHandshake
    18: (0, 3),  # ApiVersions
    19: (2, 4),  # CreateTopics
    20: (1, 3),  # DeleteTopics
    21: (0, 1),  # DeleteRecords
    22: (0, 1),  # InitProducerId
    23: (2, 3),  # OffsetForLeaderEpoch
    29: (1, 3),  # DescribeAcls
    32: (1, 4),  # DescribeConfigs
    33: (0, 2),  # AlterConfigs
    35: (1, 4),  # DescribeLogDirs
    36: (0, 1),  # SaslAuthenticate
    37: (0, 1),  # CreatePartitions
    42: (0, 2),  # DeleteGroups
    44: (0, 1),  # IncrementalAlterConfigs
    47: (0, 0),  # OffsetDelete
    60: (0, 1),  # DescribeCluster
}
"""Lowest and highest version of each API."""

_OLDEST_PRODUCE = 3
_COMPACT_METADATA = 9
"""Version of Metadata from which on its arrays are compact."""
_PADDING = 3
_REASON_MAX = 200
_LARGE = 16 * 1024
"""Bytes from which on a copy costs more than a write of its own."""
_HEAD = struct.Struct(">hhi")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

Tree = Mapping[str, Any]


class MalformedRequestError(Exception):
    """A frame is no request that is served; its connection is to be closed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A request: what it asks for, and how it is to be answered."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str
    body: Any
    elements: int = 0
    """Elements of the lists in it, which hold memory beyond its bytes."""


def read_request(frame: bytes, apis: Container[int] = SERVED) -> Request:
    """Read a frame without its length. Of an API that is not among `apis` only the head is read.

    A version of ApiVersions that is not served gives a request without a body. Raises
    `MalformedRequestError` for anything else that can't be read, and for lists with more than
    `ELEMENTS_MAX` elements.
    """
    try:
        api_key, version, correlation_id = _HEAD.unpack_from(frame)
        lowest, highest = SERVED[api_key] if api_key in apis else (0, -1)
        if not lowest <= version <= highest or (api_key == 0 and version < _OLDEST_PRODUCE):
            if api_key == API_VERSIONS:
                return Request(api_key, version, correlation_id, "", None)
            raise MalformedRequestError(f"API {api_key} in version {version} is not served")
        schema: Any = load_request_schema(api_key, version)
        elements = count_elements(schema, frame)
        header, size = entity_reader(schema.__header_schema__)(frame, 0)
        body, used = entity_reader(schema)(frame, size)
    except MalformedRequestError:
        raise
    except TooManyElementsError as error:
        raise MalformedRequestError(
            f"a request of API {api_key} in version {version} has more than {ELEMENTS_MAX} elements"
            " in its lists; send several smaller requests"
        ) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:_REASON_MAX]}"
        raise MalformedRequestError(f"a request can't be read: {reason}") from error
    over = len(frame) - size - used
    if over and not (_is_padded(api_key, version, body) and over == _PADDING):
        raise MalformedRequestError(
            f"{over} bytes follow a request of API {api_key} in version {version}"
        )
    return Request(api_key, version, correlation_id, header.client_id or "", body, elements)


def _is_padded(api_key: int, version: int, body: Any) -> bool:
    """Return whether a stock client sends bytes after such a request; Apache Kafka ignores them.

    librdkafka asks for all topics with a length of four bytes where the compact form has one.
    """
    return api_key == METADATA and version >= _COMPACT_METADATA and body.topics is None


class _Pieces(io.BytesIO):
    """Bytes that are written, in pieces: large ones as they were given, without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[bytes] = []

    def write(self, data: Any) -> int:
        if isinstance(data, bytes) and len(data) >= _LARGE:
            self.end()
            self.done.append(data)
            return len(data)
        return super().write(data)

    def end(self) -> None:
        """End the piece that small writes go to."""
        self.done.append(self.getvalue())
        self.seek(0)
        self.truncate()


def write_response(request: Request, tree: Tree) -> list[bytes]:
    """Return the pieces of the frame that answers a request, its length first."""
    version = 0 if request.body is None else request.version
    schema: Any = load_response_schema(request.api_key, version)
    out = _Pieces()
    header: Any = schema.__header_schema__
    entity_writer(header)(out, header(correlation_id=request.correlation_id))
    entity_writer(schema)(out, entity_of(schema, tree))
    out.end()
    first, *others = out.done
    size = sum(map(len, out.done))
    return [size.to_bytes(4, "big") + first, *others]


def entity_of(schema: Any, tree: Tree) -> Any:
    """Return the entity of a schema of `kio` that a tree describes."""
    return _builder(schema)(tree)


def api_versions(request: Request) -> Tree:
    """Return the answer to ApiVersions; an unknown version is told what is known."""
    code = Code.UNSUPPORTED_VERSION if request.body is None else Code.NONE
    keys = [
        {"api_key": key, "min_version": low, "max_version": high}
        for key, (low, high) in sorted(SERVED.items())
    ]
    return {"error_code": code, "api_keys": keys}


@cache
def _builder(schema: Any) -> Callable[[Tree], Any]:
    """Return what makes a `schema` of a tree."""
    hints = typing.get_type_hints(schema)
    makers = [(one.name, *_maker(one, hints[one.name])) for one in dataclasses.fields(schema)]

    def build(tree: Tree) -> Any:
        values = {}
        for name, make, default in makers:
            if name in tree:
                values[name] = make(tree[name])
            elif default is not dataclasses.MISSING:
                values[name] = default
        return schema(**values)

    return build


_EMPTY: Mapping[str, Any] = {
    "error_code": ErrorCode(0),
    "timedelta_i32": datetime.timedelta(0),
    "timedelta_i64": datetime.timedelta(0),
    "string": "",
    "bytes": b"",
    "records": None,
    "uuid": None,
}


def _maker(field: Any, hint: Any) -> tuple[Callable[[Any], Any], Any]:
    """Return what converts a value of a tree, and the value of a field that is left out."""
    has_default = field.default is not dataclasses.MISSING
    kind = field.metadata.get("kafka_type")
    item: Any = item_type(hint)
    if item is not None:
        is_struct = hasattr(item, "__dataclass_fields__")
        build: Callable[[Any], Any] = _builder(item) if is_struct else _same
        empty = None if type(None) in typing.get_args(hint) else ()
        default = dataclasses.MISSING if has_default else empty
        return lambda many: None if many is None else tuple(map(build, many)), default
    if has_default:
        return _CONVERSIONS.get(kind, _same), dataclasses.MISSING
    if kind == "string" and type(None) in typing.get_args(hint):
        return _same, None
    return _CONVERSIONS.get(kind, _same), _EMPTY.get(kind, dataclasses.MISSING)


def _same(value: Any) -> Any:
    return value


def _time(value: int) -> datetime.datetime | None:
    return None if value < 0 else _EPOCH + datetime.timedelta(milliseconds=value)


_CONVERSIONS: Mapping[Any, Callable[[Any], Any]] = {
    "error_code": ErrorCode,
    "timedelta_i32": lambda ms: datetime.timedelta(milliseconds=ms),
    "datetime_i64": _time,
}
