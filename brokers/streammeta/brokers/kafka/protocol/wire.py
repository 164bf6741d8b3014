"""Requests and answers of Kafka's protocol: the supported versions, and encoding by `kio`.

Answers are trees of dicts with the field names of the newest version. Fields unknown to an older
version are dropped, and missing fields get their empty value.
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

from streammeta.brokers.kafka.protocol import request_elements
from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.storage.installation import optional_packages

with optional_packages("the Kafka-shaped broker"):
    from kio.index import load_request_schema, load_response_schema
    from kio.schema.errors import ErrorCode
    from kio.serial import entity_reader, entity_writer

METADATA, SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE = 3, 17, 18, 36

SERVED: Mapping[int, tuple[int, int]] = {
    0: (0, 8),  # Produce. librdkafka compresses only if 0 to 2 are announced; they are rejected
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
"""First version of Metadata with compact arrays."""
_PADDING = 3
_REASON_MAX = 200
_LARGE = 16 * 1024
"""Size from which a copy costs more than a separate write, in bytes."""
_HEAD = struct.Struct(">hhi")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

Tree = Mapping[str, Any]


class MalformedRequestError(Exception):
    """A frame is not a supported request. Its connection must be closed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A parsed request with the facts needed to answer it."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str
    body: Any
    elements: int = 0
    """Number of elements in its lists, which need memory in addition to its bytes."""


def read_request(frame: bytes, apis: Container[int] = SERVED) -> Request:
    """Parse a frame without its length. For an API not in `apis` only the header is parsed.

    An unsupported version of ApiVersions returns a request without a body. Raises
    `MalformedRequestError` for anything else that is unreadable, and for lists with more than
    `ELEMENTS_MAX` elements.
    """
    try:
        api_key, version, correlation_id = _HEAD.unpack_from(frame)
        lowest, highest = SERVED[api_key] if api_key in apis else (0, -1)
        if not lowest <= version <= highest or (api_key == 0 and version < _OLDEST_PRODUCE):
            if api_key == API_VERSIONS:
                return Request(api_key, version, correlation_id, "", None)
            raise MalformedRequestError(f"API {api_key} version {version} is not supported")
        schema: Any = load_request_schema(api_key, version)
        elements = request_elements.count_elements(schema, frame)
        header, size = entity_reader(schema.__header_schema__)(frame, 0)
        body, used = entity_reader(schema)(frame, size)
    except MalformedRequestError:
        raise
    except request_elements.TooManyElementsError as error:
        raise MalformedRequestError(
            f"a request of API {api_key} in version {version} has more than"
            f" {request_elements.ELEMENTS_MAX} elements in its lists. Send several smaller requests"
        ) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:_REASON_MAX]}"
        raise MalformedRequestError(f"a request is unreadable: {reason}") from error

    # Unexplained bytes mean that client and broker disagree about the schema: nothing read from
    # this frame can be trusted.
    over = len(frame) - size - used
    if over and not (_is_padded(api_key, version, body) and over == _PADDING):
        raise MalformedRequestError(
            f"{over} bytes follow a request of API {api_key} in version {version}"
        )

    return Request(api_key, version, correlation_id, header.client_id or "", body, elements)


def _is_padded(api_key: int, version: int, body: Any) -> bool:
    """Return whether a stock client pads such a request. Apache Kafka ignores the padding.

    librdkafka asks for all topics with a length of four bytes where the compact form has one.
    """
    return api_key == METADATA and version >= _COMPACT_METADATA and body.topics is None


class _Pieces(io.BytesIO):
    """Output buffer in pieces. Large values become pieces without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[bytes] = []

    def write(self, data: Any) -> int:
        # Record batches dominate a Fetch answer. Copying them would double its memory.
        if isinstance(data, bytes) and len(data) >= _LARGE:
            self.end()
            self.done.append(data)
            return len(data)
        return super().write(data)

    def end(self) -> None:
        """End the current piece of small writes."""
        self.done.append(self.getvalue())
        self.seek(0)
        self.truncate()


def write_response(request: Request, tree: Tree) -> list[bytes]:
    """Return the pieces of the frame that answers a request, its length first."""
    # KIP-511: a client that asked in an unknown version understands version 0 only.
    version = 0 if request.body is None else request.version
    schema: Any = load_response_schema(request.api_key, version)
    out = _Pieces()
    header: Any = schema.__header_schema__
    entity_writer(header)(out, header(correlation_id=request.correlation_id))
    entity_writer(schema)(out, entity_of(schema, tree))
    out.end()
    first, *others = out.done
    # The length counts everything after itself.
    size = sum(map(len, out.done))
    return [size.to_bytes(4, "big") + first, *others]


def entity_of(schema: Any, tree: Tree) -> Any:
    """Return the entity of a `kio` schema described by a tree."""
    return _builder(schema)(tree)


def api_versions(request: Request) -> Tree:
    """Return the answer to ApiVersions. An unknown version gets the supported ones."""
    code = Code.UNSUPPORTED_VERSION if request.body is None else Code.NONE
    keys = [
        {"api_key": key, "min_version": low, "max_version": high}
        for key, (low, high) in sorted(SERVED.items())
    ]
    return {"error_code": code, "api_keys": keys}


@cache
def _builder(schema: Any) -> Callable[[Tree], Any]:
    """Return a function that builds a `schema` from a tree."""
    hints = typing.get_type_hints(schema)
    makers = [
        (field.name, *_maker(field, hints[field.name])) for field in dataclasses.fields(schema)
    ]

    def build(tree: Tree) -> Any:
        values = {}
        for name, make, default in makers:
            if name in tree:
                values[name] = make(tree[name])
            # kio's own default applies to all other fields.
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
    """Return the conversion of a field's value, and the default of a missing field."""
    has_default = field.default is not dataclasses.MISSING
    kind = field.metadata.get("kafka_type")
    item: Any = request_elements.item_type(hint)
    if item is not None:
        is_struct = hasattr(item, "__dataclass_fields__")
        build: Callable[[Any], Any] = _builder(item) if is_struct else _same
        empty = None if type(None) in typing.get_args(hint) else ()
        default = dataclasses.MISSING if has_default else empty
        return lambda many: None if many is None else tuple(map(build, many)), default
    if has_default:
        return _CONVERSIONS.get(kind, _same), dataclasses.MISSING
    # kio marks nullable strings by their type only.
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
