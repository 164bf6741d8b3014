"""The router finds the leader and never hammers; failures in a status are read back."""

import random

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from streammeta.rpc.failures import (
    TOO_MANY_CALLS,
    Reason,
    RpcFailure,
    details_trailer,
    read_failure,
)
from streammeta.rpc.leader_router import (
    LEARNED_MAX,
    LOOK_ROUND,
    REFUSAL_BACKOFF,
    RETRY_AFTER_S_MAX,
    FailureKind,
    LeaderHint,
    LeaderRouter,
    LeaderSearch,
)

ABC = ["a:1", "b:1", "c:1"]


def router(endpoints: list[str] | None = None, seed: int = 1) -> LeaderRouter:
    return LeaderRouter(endpoints or ABC, random.Random(seed))


def test_hint_is_followed_at_once_and_remembered() -> None:
    r = router()
    start = r.first()
    step = r.record_failure(start, FailureKind.NOT_LEADER, 1, LeaderHint("z:9", 5))
    assert (step.endpoint, step.wait) == ("z:9", 0.0)
    r.record_answer("z:9")
    assert r.first() == "z:9"


def test_hint_to_a_dead_leader_is_ignored_until_the_epoch_grows() -> None:
    r = router()
    r.record_failure("a:1", FailureKind.NOT_LEADER, 1, LeaderHint("b:1", 5))
    assert r.record_failure("b:1", FailureKind.UNREACHABLE, 2).endpoint == "c:1"
    assert (
        r.record_failure("c:1", FailureKind.NOT_LEADER, 3, LeaderHint("b:1", 5)).endpoint == "a:1"
    )
    assert (
        r.record_failure("a:1", FailureKind.NOT_LEADER, 4, LeaderHint("b:1", 6)).endpoint == "b:1"
    )


def test_hint_of_an_older_epoch_is_ignored() -> None:
    r = router()
    r.record_failure("a:1", FailureKind.NOT_LEADER, 1, LeaderHint("b:1", 5))
    r.record_answer("b:1")
    r.record_failure("b:1", FailureKind.OUTCOME_UNKNOWN, 1)
    assert (
        r.record_failure("c:1", FailureKind.NOT_LEADER, 2, LeaderHint("b:1", 4)).endpoint == "a:1"
    )


def test_hint_to_the_endpoint_that_gave_it_is_ignored() -> None:
    step = router().record_failure("a:1", FailureKind.NOT_LEADER, 1, LeaderHint("a:1", 5))
    assert step.endpoint == "b:1"
    assert step.wait > 0


def test_a_restarted_leader_is_trusted_again_once_it_answers() -> None:
    r = router()
    r.record_failure("b:1", FailureKind.UNREACHABLE, 1)
    r.record_answer("b:1")
    assert (
        r.record_failure("a:1", FailureKind.NOT_LEADER, 1, LeaderHint("b:1", 0)).endpoint == "b:1"
    )


def test_leader_found_by_another_call_is_used_at_once() -> None:
    r = router()
    r.record_answer("c:1")
    step = r.record_failure("a:1", FailureKind.UNREACHABLE, 1)
    assert (step.endpoint, step.wait) == ("c:1", 0.0)


def test_dead_endpoints_are_tried_one_after_the_other_before_any_wait() -> None:
    r = router()
    at, seen, waits = r.first(), [], []
    for failures in range(1, 4):
        seen.append(at)
        step = r.record_failure(at, FailureKind.UNREACHABLE, failures)
        at = step.endpoint
        waits.append(step.wait)
    assert sorted(seen) == ABC
    assert waits[:2] == [0.0, 0.0]
    assert waits[2] > 0


def asked_after_a_hang(rounds: int) -> list[str]:
    """Endpoints that a call asks after a:1 hung, while the others know no leader."""
    r = router()
    r.record_answer("a:1")
    at, asked = r.record_failure("a:1", FailureKind.TIMED_OUT, 1).endpoint, []
    for failures in range(2, 2 + rounds * len(ABC)):
        asked.append(at)
        at = r.record_failure(at, FailureKind.NOT_LEADER, failures, LeaderHint("a:1", 0)).endpoint
    return asked


def test_a_controller_that_hangs_is_not_asked_again_while_the_others_elect() -> None:
    assert set(asked_after_a_hang(rounds=7)) == {"b:1", "c:1"}


def test_a_controller_that_hung_is_not_given_up_for_good() -> None:
    assert set(asked_after_a_hang(rounds=10)) == set(ABC)


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    steps=st.lists(
        st.tuples(
            st.sampled_from(list(FailureKind)),
            st.none() | st.tuples(st.integers(0, 6), st.integers(0, 3)),
        ),
        max_size=60,
    ),
)
def test_waits_are_bounded_and_free_steps_are_few(
    seed: int, size: int, steps: list[tuple[FailureKind, tuple[int, int] | None]]
) -> None:
    """Whatever the answers, a call without success waits before each attempt after a round."""
    r = LeaderRouter([f"h{i}:1" for i in range(size)], random.Random(seed))
    at = r.first()
    for failures, (failure, raw) in enumerate(steps, start=1):
        hint = None if raw is None else LeaderHint(f"h{raw[0]}:1", raw[1])
        step = r.record_failure(at, failure, failures, hint)
        assert step.endpoint
        assert 0.0 <= step.wait <= REFUSAL_BACKOFF.longest
        assert step.wait > 0 or failures <= len(r.known) <= size + LEARNED_MAX
        at = step.endpoint


@pytest.mark.parametrize("endpoints", [[], ["a:1", "a:1"], [""]])
def test_useless_endpoints_are_refused(endpoints: list[str]) -> None:
    with pytest.raises(ValueError, match="endpoints"):
        LeaderRouter(endpoints, random.Random(1))


def test_a_leader_that_can_take_nothing_now_is_asked_again_after_growing_waits() -> None:
    r = router()
    r.record_answer("b:1")
    waits = []
    for failures in range(1, LOOK_ROUND):
        step = r.record_failure("b:1", FailureKind.NOT_NOW, failures)
        assert step.endpoint == "b:1"
        waits.append(step.wait)
    assert min(waits) > 0
    assert r.leader == "b:1", "it leads all the same"
    late = [
        r.record_failure("b:1", FailureKind.NOT_NOW, LOOK_ROUND * n + 1).wait for n in range(2, 40)
    ]
    assert min(late) >= 0.5, "the waits have grown to what bounds the rate"


def test_one_that_goes_on_refusing_does_not_hide_the_next_leader() -> None:
    """It may not have heard that it leads no more."""
    r = router()
    r.record_answer("b:1")
    step = r.record_failure("b:1", FailureKind.NOT_NOW, LOOK_ROUND)
    assert step.endpoint != "b:1"
    assert step.wait > 0
    assert (
        r.record_failure(step.endpoint, FailureKind.NOT_LEADER, 5, LeaderHint("z:9", 9)).endpoint
        == "z:9"
    )
    r.record_answer("z:9")
    assert r.record_failure("b:1", FailureKind.NOT_NOW, 1).endpoint == "z:9"


GONE = RpcFailure(grpc.StatusCode.UNAVAILABLE, "connection refused")


def test_a_search_follows_the_hint_in_a_refusal_and_forgets_once_it_is_answered() -> None:
    search = LeaderSearch(router())
    asked = search.endpoint
    hint = {"leader_endpoint": "z:9", "epoch": "5"}
    refused = RpcFailure(grpc.StatusCode.UNAVAILABLE, "not here", Reason.NOT_LEADER, hint)
    assert search.record_failure(refused) == 0.0
    assert search.endpoint == "z:9"
    assert search.failures == {"z:9": "no answer yet", asked: "UNAVAILABLE not here"}
    search.record_answer()
    assert search.failures == {"z:9": "no answer yet"}


@pytest.mark.parametrize(
    "failure",
    [
        RpcFailure(grpc.StatusCode.INVALID_ARGUMENT, "no", Reason.INVALID_FIELD),
        RpcFailure(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large"),
        RpcFailure(grpc.StatusCode.INTERNAL, "defect", Reason.DEFECT),
        RpcFailure(grpc.StatusCode.UNAUTHENTICATED, "who?", Reason.NO_IDENTITY),
        RpcFailure(grpc.StatusCode.PERMISSION_DENIED, "no", Reason.NOT_YOUR_NODE),
    ],
    ids=lambda failure: str(failure.code.name),
)
def test_a_search_gives_up_what_would_fail_again(failure: RpcFailure) -> None:
    search = LeaderSearch(router())
    assert search.record_failure(failure) is None
    assert not search.tried


@pytest.mark.parametrize(("asked_s", "waited_s"), [(7.5, 7.5), (600.0, RETRY_AFTER_S_MAX)])
def test_a_search_waits_as_long_as_a_controller_says(asked_s: float, waited_s: float) -> None:
    search = LeaderSearch(router())
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    rate = RpcFailure(exhausted, "too much", Reason.QUOTA_EXCEEDED, retry_after_s=asked_s)
    assert search.record_failure(rate) == waited_s
    assert search.refusal == Reason.QUOTA_EXCEEDED
    count = RpcFailure(exhausted, "too many", Reason.QUOTA_EXCEEDED)
    assert search.record_failure(count) is None, "waiting makes no room"


def test_a_search_ends_at_a_failure_that_its_caller_does_not_repeat() -> None:
    search = LeaderSearch(router(), {FailureKind.UNREACHABLE})
    assert search.record_failure(GONE) is not None
    busy = RpcFailure(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", Reason.BUSY)
    assert search.record_failure(busy) is None


def test_a_search_is_unreachable_once_every_endpoint_was_out_of_reach() -> None:
    search = LeaderSearch(router())
    for left in (2, 1, 0):
        search.record_failure(GONE)
        assert search.is_unreachable == (left == 0)


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
