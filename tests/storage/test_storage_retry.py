"""Repeated requests: when they wait, how long, when they give up, and how the store is spared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import DeadlineExceededError, StorageError, StoreUnavailableError
from streammeta.storage.object_store.calls import Tally
from streammeta.storage.object_store.retry import Retrier, RetryPolicy, run_for

PATIENCE_S = 30.0


def failing(*errors: StorageError) -> Callable[[], str]:
    """A request that raises `errors` one after the other and then succeeds."""
    left = list(errors)

    def request() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return request


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
    retrier = Retrier(RetryPolicy(), sleep=slept.append)
    asked = StoreUnavailableError("later", retry_after_s=600)
    with pytest.raises(DeadlineExceededError, match=r"attempt 1, which failed: later") as caught:
        retrier.call(failing(asked), deadline=time.monotonic() + 60)
    assert caught.value.__cause__ is asked
    with pytest.raises(DeadlineExceededError, match="no time is left"):
        retrier.call(failing(asked))  # the policy has a limit of its own
    assert slept == []


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


def test_the_limit_grows_by_one_a_round_of_successes() -> None:
    retrier = Retrier(RetryPolicy(attempts=1, concurrency=64), sleep=lambda _: None)
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            retrier.call(failing(throttled()))
    assert retrier.concurrency_limit == 8
    for _ in range(9):
        retrier.call(failing())
    assert retrier.concurrency_limit == 9
    for _ in range(1000):
        retrier.call(failing())
    assert 40 <= retrier.concurrency_limit <= 64


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
        with pytest.raises(DeadlineExceededError, match="waiting for 1 other requests"):
            retrier.call(failing(), deadline=time.monotonic() + 0.05)
        go_on.set()
        assert running.result(PATIENCE_S) == "slow"
    assert retrier.call(failing(), deadline=time.monotonic() + PATIENCE_S) == "done"


def test_a_request_that_hangs_is_left_behind_at_the_deadline() -> None:
    retrier = Retrier(RetryPolicy(concurrency=1))
    go_on = threading.Event()
    with pytest.raises(DeadlineExceededError, match="exceeded before the answer"):
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
