"""One policy of retries: by the reason of a failure, then by the deadline."""

from __future__ import annotations

import math

import pytest

from streammeta.storage import errors
from streammeta.storage.backoff import Backoff
from streammeta.storage.object_store.protocol.patience import RETRY_AFTER_S_MAX, Patience

PATIENCE = Patience(Backoff(first=0.5, longest=8.0))
DOWN = errors.StoreUnavailableError("down")


@pytest.mark.parametrize(
    "error",
    [DOWN, errors.DeadlineExceededError("late"), errors.AccessDeniedError("RequestTimeTooSkewed")],
    ids=lambda error: type(error).__name__,
)
def test_what_may_pass_is_repeated_until_the_deadline(error: errors.StorageError) -> None:
    assert PATIENCE.wait_s(error, 0) == 0.5
    assert PATIENCE.wait_s(error, 10, left_s=60.0) == 8.0
    assert PATIENCE.wait_s(error, 10, left_s=3.0) == 3.0, "the last attempt is at the deadline"
    assert PATIENCE.wait_s(error, 10, left_s=0.0) is None


@pytest.mark.parametrize(
    "error",
    [
        errors.BucketNotFoundError("bucket"),
        errors.WrongBucketError("ns", "another cluster's", "cluster c"),
        errors.StoreRejectedError("EntityTooLarge"),
        errors.InvalidKeyError("key", "too long"),
        errors.ObjectExistsError("key"),
        errors.ObjectNotFoundError("key"),
        errors.CorruptObjectError("key", 0, "magic", 1, 2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_does_not_pass_is_not_repeated(error: errors.StorageError) -> None:
    assert PATIENCE.wait_s(error, 0, left_s=math.inf) is None


def test_a_store_may_ask_for_a_longer_wait_within_the_bound_and_the_deadline() -> None:
    def asks(seconds: float) -> errors.StorageError:
        return errors.StoreUnavailableError("later", retry_after_s=seconds)

    assert PATIENCE.wait_s(asks(4.0), 0) == 4.0
    assert PATIENCE.wait_s(asks(0.1), 0) == 0.5, "no shorter one"
    assert PATIENCE.wait_s(asks(86_400.0), 0, left_s=60.0) == RETRY_AFTER_S_MAX
    assert PATIENCE.wait_s(asks(86_400.0), 0, left_s=2.0) == 2.0
