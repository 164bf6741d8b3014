"""Statuses of the server itself, with reasons that programs can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import grpc

from streammeta.controller.grpc_server.headers import Metadata
from streammeta.rpc.failures import Reason, details_trailer


class Refusal(NamedTuple):
    """A status with its reason in the trailers."""

    code: grpc.StatusCode
    details: str
    trailing: Metadata


def over_limit(field: str, limit: int, details: str) -> Refusal:
    """Return the refusal of a call whose message or headers are too large."""
    metadata = {"field": field, "limit": str(limit)}
    return _refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.LIMIT_EXCEEDED, details, metadata)


def busy(details: str) -> Refusal:
    """Return the refusal of a call that is too much for now."""
    return _refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.BUSY, details, {})


def defect(details: str) -> Refusal:
    """Return the status of a call whose handler did what no handler should."""
    return _refusal(grpc.StatusCode.INTERNAL, Reason.DEFECT, details, {})


def _refusal(
    code: grpc.StatusCode, reason: Reason, details: str, metadata: Mapping[str, str]
) -> Refusal:
    return Refusal(code, details, details_trailer(code, details, reason, metadata))
