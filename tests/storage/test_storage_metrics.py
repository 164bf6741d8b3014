"""Calls are counted, with what they moved and how they ended."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from streammeta.storage.object_store.calls import Meter, OperationMetrics


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
