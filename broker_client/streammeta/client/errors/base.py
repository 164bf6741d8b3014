"""Base classes of the client's errors."""

from __future__ import annotations

from typing import ClassVar

from streammeta.v1 import common_pb2


class BrokerClientError(Exception):
    """Base class of the client's errors: catch it to handle every failure."""

    retriable: ClassVar[bool] = False


def code_name(code: int) -> str:
    """Return the readable name of an error code, e.g. "STREAM_FENCED"."""
    return common_pb2.ErrorCode.Name(common_pb2.ErrorCode.ValueType(code)).removeprefix(
        "ERROR_CODE_"
    )


class RejectedError(BrokerClientError):
    """The controllers rejected one item, or a whole call.

    `subject` is the rejected item (such as `stream 7`), `code` the error code or None when the call
    ended with a gRPC status, `detail` the controller's message or additions of the client.
    """

    advice: ClassVar[str] = "see the controller's log for the reason"

    def __init__(self, subject: str, *, code: int | None = None, detail: str = "") -> None:
        self.subject = subject
        self.code = code
        self.detail = detail
        reason = "" if code is None else f" with {code_name(code)}"
        words = f" ({detail})" if detail else ""
        super().__init__(f"{subject} was rejected{reason}{words}; {self.advice}")
