"""What a controller writes into a status is read back; what others write is not taken for it."""

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from streammeta.rpc.failures import (
    TOO_MANY_CALLS,
    Reason,
    RpcFailure,
    details_trailer,
    read_failure,
)

CODE = grpc.StatusCode.UNAVAILABLE
NAME = "grpc-status-details-bin"


def ended(
    *trailers: tuple[str, bytes], code: grpc.StatusCode = CODE, details: str = "gone"
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=details
    )


def test_reason_and_metadata_are_read_back() -> None:
    trailer = details_trailer(CODE, "gone", Reason.NOT_LEADER, {"epoch": "7"})
    failure = read_failure(ended(("other", b"x"), *trailer))
    assert failure == RpcFailure(CODE, "gone", "NOT_LEADER", {"epoch": "7"})
    assert failure.text == "UNAVAILABLE gone"


def of_another_domain() -> bytes:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="NOT_LEADER", domain="proxy.example"))
    written: bytes = status_pb2.Status(details=[detail]).SerializeToString()
    return written


@pytest.mark.parametrize(
    "trailers",
    [(), ((NAME, b"\xff\xff"),), ((NAME, b""),), ((NAME, of_another_domain()),)],
    ids=["none", "no status", "no details", "another domain"],
)
def test_a_status_without_our_details_has_no_reason(
    trailers: tuple[tuple[str, bytes], ...],
) -> None:
    assert read_failure(ended(*trailers)) == RpcFailure(CODE, "gone")


def test_too_many_calls_of_a_controller_without_reasons_are_temporary() -> None:
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert read_failure(ended(code=full, details=TOO_MANY_CALLS)).reason == Reason.BUSY
    assert read_failure(ended(code=full, details="too large")).reason == ""


def test_an_error_without_a_status_is_unknown() -> None:
    assert read_failure(grpc.RpcError("odd")) == RpcFailure(grpc.StatusCode.UNKNOWN, "odd")
