"""One served method: its handler, and how its messages are encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc


@dataclass(frozen=True, slots=True)
class Method:
    """A method that is served."""

    behavior: Callable[[Any, Any], Any]
    request_streaming: bool
    response_streaming: bool
    deserialize: Callable[[bytes], Any] | None
    serialize: Callable[[Any], bytes] | None
    is_priority: bool = False
    """Whether its calls wait only for each other, and are never rejected because others wait."""

    @classmethod
    def of(cls, handler: grpc.RpcMethodHandler[Any, Any], *, is_priority: bool = False) -> Method:
        """Return the method that a handler of gRPC's serves."""
        found: Any = handler
        name = "_".join(
            "stream" if streams else "unary"
            for streams in (found.request_streaming, found.response_streaming)
        )
        return cls(
            getattr(found, name),
            found.request_streaming,
            found.response_streaming,
            found.request_deserializer,
            found.response_serializer,
            is_priority,
        )
