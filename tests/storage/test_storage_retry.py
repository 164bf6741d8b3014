"""Repeated requests: waits, limits, deadlines and back-pressure; and the counters of calls."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from streammeta.storage import errors
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import DeadlineExceededError, StorageError, StoreUnavailableError
from streammeta.storage.object_store.protocol.calls import Meter, OperationMetrics, Tally
from streammeta.storage.object_store.protocol.patience import RETRY_AFTER_S_MAX, Patience
from streammeta.storage.object_store.protocol.retry import Retrier, RetryPolicy, run_for

PATIENCE_S = 60.0


def failing(*errors: StorageError) -> Callable[[], str]:
    """A request that raises `errors` one after the other and then succeeds."""
    left = list(errors)

    def request() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return request


def down() -> None:
    raise StoreUnavailableError("down")


def refused() -> None:
    raise throttled()


def throttled() -> StoreUnavailableError:
    return StoreUnavailableError("slow down", throttled=True)


def test_the_store_is_not_asked_again_before_it_wants_to_be() -> None:
    slept: list[float] = []
    retrier = Retrier(RetryPolicy(), sleep=slept.append, random_unit=lambda: 0.5)
    asked = StoreUnavailableError("later", retry_after_s=7.5)
    assert retrier.call(failing(asked, StoreUnavailableError("now"))) == "done"
    assert slept == [7.5, 0.2]


def test_a_delay_that_would_end_too_late_is_not_waited_for() -> None:
    slept: list[float] = []
    error = StoreUnavailableError("later")
    policy = RetryPolicy(first_delay_s=60.0, longest_delay_s=60.0)
    retrier = Retrier(policy, sleep=slept.append, random_unit=lambda: 1.0)
    with pytest.raises(DeadlineExceededError, match="attempt 1") as caught:
        retrier.call(failing(error), deadline=time.monotonic() + 60)
    assert caught.value.__cause__ is error
    policy = RetryPolicy(first_delay_s=60.0, longest_delay_s=60.0, call_s=30.0)
    retrier = Retrier(policy, sleep=slept.append, random_unit=lambda: 1.0)
    with pytest.raises(DeadlineExceededError):
        retrier.call(failing(error))  # the policy has a limit of its own
    assert slept == []


def test_a_store_that_asks_for_a_day_is_asked_again_within_the_bound_and_the_deadline() -> None:
    slept: list[float] = []
    retrier = Retrier(RetryPolicy(), sleep=slept.append, random_unit=lambda: 0.0)
    a_day = StoreUnavailableError("later", retry_after_s=86_400)
    assert retrier.call(failing(a_day)) == "done"
    assert slept == [RETRY_AFTER_S_MAX]
    assert retrier.call(failing(a_day), deadline=time.monotonic() + 4) == "done"
    assert 0 < slept[1] <= 2, "half of the time that is left"


def test_repetitions_and_throttling_are_counted() -> None:
    tally = Tally()
    retrier = Retrier(RetryPolicy(), sleep=lambda _: None)
    retrier.call(failing(throttled(), StoreUnavailableError("down")), tally=tally)
    assert (tally.retries, tally.throttled) == (2, 1)


def test_requests_that_were_under_way_together_halve_the_limit_once() -> None:
    retrier = Retrier(RetryPolicy(attempts=1, concurrency=32), sleep=lambda _: None)
    for wanted in (16, 8):
        count = retrier.concurrency_limit
        all_under_way = threading.Barrier(count)

        def refused(barrier: threading.Barrier = all_under_way) -> None:
            barrier.wait(PATIENCE_S)
            raise throttled()

        def run(request: Callable[[], None] = refused) -> None:
            with pytest.raises(StoreUnavailableError):
                retrier.call(request)

        with ThreadPoolExecutor(count) as pool:
            for done in [pool.submit(run) for _ in range(count)]:
                done.result(PATIENCE_S)
        assert retrier.concurrency_limit == wanted


def test_the_delay_doubles_up_to_its_bound_and_is_random() -> None:
    slept: list[float] = []
    policy = RetryPolicy(attempts=6, first_delay_s=1.0, longest_delay_s=10.0)
    retrier = Retrier(policy, sleep=slept.append, random_unit=lambda: 0.5)

    with pytest.raises(StoreUnavailableError, match="down"):
        retrier.call(down)
    assert slept == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_the_budget_ends_retries_of_all_calls_and_is_earned_back() -> None:
    slept: list[float] = []
    retrier = Retrier(RetryPolicy(attempts=5, budget=6), sleep=slept.append)
    for _ in range(4):
        with pytest.raises(StoreUnavailableError):
            retrier.call(down)
    assert len(slept) == 6
    for _ in range(11):
        retrier.call(lambda: None)
    with pytest.raises(StoreUnavailableError):
        retrier.call(down)
    assert len(slept) == 7


def test_no_more_requests_run_at_a_time_than_the_limit() -> None:
    retrier = Retrier(RetryPolicy(concurrency=3))
    lock, running, most = threading.Lock(), [0], [0]
    gate = threading.Semaphore(0)

    def request() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        gate.acquire(timeout=60)
        with lock:
            running[0] -= 1

    with ThreadPoolExecutor(9) as pool:
        for _ in range(9):
            pool.submit(retrier.call, request)
        gate.release(9)
    assert running == [0]
    assert most[0] <= 3


def test_throttling_halves_the_limit_and_each_round_of_successes_adds_one() -> None:
    retrier = Retrier(RetryPolicy(attempts=1, concurrency=16), sleep=lambda _: None)
    for wanted in (8, 4, 2, 1, 1):
        with pytest.raises(StoreUnavailableError):
            retrier.call(refused)
        assert retrier.concurrency_limit == wanted
    for wanted in range(2, 17):
        for _ in range(wanted):
            retrier.call(failing())
        assert retrier.concurrency_limit == wanted
    retrier.call(failing())
    assert retrier.concurrency_limit == 16


def test_waiting_for_a_turn_ends_with_the_deadline() -> None:
    retrier = Retrier(RetryPolicy(concurrency=1))
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return "slow"

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(retrier.call, slow)
        assert begun.wait(PATIENCE_S)
        with pytest.raises(DeadlineExceededError, match="1"):
            retrier.call(failing(), deadline=time.monotonic() + 0.05)
        go_on.set()
        assert running.result(PATIENCE_S) == "slow"
    assert retrier.call(failing(), deadline=time.monotonic() + PATIENCE_S) == "done"


def test_a_request_that_hangs_is_left_behind_at_the_deadline() -> None:
    retrier = Retrier(RetryPolicy(concurrency=1))
    go_on = threading.Event()
    with pytest.raises(DeadlineExceededError):
        retrier.call(lambda: go_on.wait(PATIENCE_S), deadline=time.monotonic() + 0.05)
    # Its turn was given back: the next request runs although the first still hangs.
    assert retrier.call(failing(), deadline=time.monotonic() + PATIENCE_S) == "done"
    go_on.set()


def test_what_a_watched_request_raises_is_raised() -> None:
    assert run_for(PATIENCE_S, failing()) == "done"
    with pytest.raises(StoreUnavailableError, match="down"):
        run_for(PATIENCE_S, failing(StoreUnavailableError("down")))

    def times_out() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        run_for(PATIENCE_S, times_out)


def test_a_backoff_doubles_up_to_its_longest_wait_and_draws_the_share_that_is_random() -> None:
    assert [Backoff(1, 5).wait(attempt) for attempt in (0, 1, 2, 3, 5000)] == [1, 2, 4, 5, 5]
    assert [Backoff(8, 8, jitter).wait(0, 0.25) for jitter in (0, 0.5, 1)] == [8, 5, 2]


# Counters


def test_a_call_that_fails_moves_no_bytes_but_keeps_its_repetitions() -> None:
    meter = Meter()

    def break_off() -> None:
        with meter.call("put") as tally:
            tally.retries, tally.throttled, tally.bytes_sent = 3, 2, 100
            raise RuntimeError("broke")

    with pytest.raises(RuntimeError, match="broke"):
        break_off()
    counted = meter.snapshot().of("put")
    assert (counted.calls, counted.failures, counted.bytes_sent) == (1, 1, 0)
    assert (counted.retries, counted.throttled, counted.requests) == (3, 2, 4)
    assert meter.snapshot().of("get_range") == OperationMetrics()


def test_calls_under_way_are_counted_until_they_end_whichever_way() -> None:
    meter = Meter()
    with meter.call("put"):
        with meter.call("get_range"):
            assert meter.snapshot().in_flight == 2
        assert meter.snapshot().in_flight == 1
        with pytest.raises(RuntimeError), meter.call("head"):
            raise RuntimeError("broke")
    assert meter.snapshot().in_flight == 0


def test_a_snapshot_stays_as_it_was_and_threads_lose_no_call() -> None:
    meter = Meter()

    def call(_: int) -> None:
        with meter.call("put") as tally:
            tally.bytes_sent = 2

    call(0)
    before = meter.snapshot(7)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(2000)))
    assert (before.of("put").calls, before.concurrency_limit) == (1, 7)
    assert (meter.snapshot().of("put").calls, meter.snapshot().of("put").bytes_sent) == (2001, 4002)


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
