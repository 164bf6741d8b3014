"""Every refusal of the contract is an exception of its own that says what to do."""

from __future__ import annotations

import pytest

from streammeta.client import errors
from streammeta.v1.common_pb2 import (
    ERROR_CODE_NONE,
    ERROR_CODE_OBJECT_NOT_EXIST,
    ERROR_CODE_OFFSET_NOT_MATCHED,
    ErrorCode,
)


def test_every_error_code_has_an_exception() -> None:
    assert set(errors.ERRORS_BY_CODE) == set(ErrorCode.values()) - {ERROR_CODE_NONE}


@pytest.mark.parametrize("code", sorted(set(ErrorCode.values()) - {ERROR_CODE_NONE}))
def test_message_names_subject_and_code_and_gives_advice(code: ErrorCode.ValueType) -> None:
    error = errors.refusal(code, "stream 7")
    assert error.code == code
    assert str(error).startswith(f"stream 7 was refused with {errors.code_name(code)}; ")
    assert str(error).endswith(type(error).advice)
    assert isinstance(error, errors.ERRORS_BY_CODE[code]) or code == ERROR_CODE_OFFSET_NOT_MATCHED


def test_unknown_code_is_a_violation_and_none_is_no_refusal() -> None:
    newer: ErrorCode.ValueType = 777  # type: ignore[assignment]
    assert "unknown error code 777" in str(errors.refusal(newer, "stream 7"))
    with pytest.raises(ValueError, match="NONE"):
        errors.refusal(ERROR_CODE_NONE, "stream 7")


def test_expired_object_tells_to_upload_again() -> None:
    message = str(errors.refusal(ERROR_CODE_OBJECT_NOT_EXIST, "commit of object 5"))
    assert "garbage" in message
    assert "prepare new ids and upload again" in message


def test_offset_mismatch_names_both_offsets() -> None:
    assert "starts at offset 40, wanted offset 30" in str(errors.OffsetMismatchError(7, 30, 40))
    assert "wanted its end offset" in str(errors.OffsetMismatchError(7, None, 40))


def test_only_what_may_succeed_unchanged_is_retriable() -> None:
    retriable = {kind for kind in errors.ERRORS_BY_CODE.values() if kind.retriable}
    assert retriable == {errors.StreamNotClosedError, errors.NodeLockedError}
    assert errors.ControllerUnavailableError("GetObjects", 1.0, {}).retriable
