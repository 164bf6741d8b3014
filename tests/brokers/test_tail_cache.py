"""Newest batches in memory: bounds, durability, and the batches that a read takes."""

from __future__ import annotations

from streammeta.brokers.partition.tail_cache import TailCache


def _filled(max_bytes: int = 1_000) -> TailCache:
    """Return a cache of batches [0, 3), [3, 4) and [4, 6)."""
    cache = TailCache(max_bytes)
    cache.add(0, 3, b"aaa")
    cache.add(3, 4, b"b")
    cache.add(4, 6, b"cc")
    return cache


def test_a_read_begins_with_the_batch_that_holds_the_offset() -> None:
    cache = _filled()
    assert cache.read(0, 6, 100) == [b"aaa", b"b", b"cc"]
    assert cache.read(2, 6, 100) == [b"aaa", b"b", b"cc"]
    assert cache.read(3, 6, 100) == [b"b", b"cc"]
    assert cache.read(5, 6, 100) == [b"cc"]


def test_a_read_ends_before_batches_that_are_not_durable() -> None:
    cache = _filled()
    assert cache.read(0, 4, 100) == [b"aaa", b"b"]
    assert cache.read(0, 3, 100) == [b"aaa"]
    assert cache.read(0, 0, 100) == []


def test_a_read_takes_one_batch_or_as_many_as_fit() -> None:
    cache = _filled()
    assert cache.read(0, 6, 1) == [b"aaa"]
    assert cache.read(0, 6, 3) == [b"aaa"]
    assert cache.read(0, 6, 4) == [b"aaa", b"b"]


def test_the_oldest_batches_leave_first_and_the_newest_stays() -> None:
    assert _filled(6).read(0, 6, 100) == [b"aaa", b"b", b"cc"]
    assert _filled(5).read(2, 6, 100) is None
    assert _filled(5).read(3, 6, 100) == [b"b", b"cc"]
    assert _filled(1).read(4, 6, 100) == [b"cc"]
    assert _filled(1).read(3, 6, 100) is None


def test_an_empty_cache_knows_nothing() -> None:
    assert TailCache().read(0, 6, 100) is None
