"""Bounded load of small writes on a running cluster, and the verdict on its figures.

The load writes values of keys in a reserved namespace at a fixed rate. Like a commit, each write is
decided by the leader, replicated, and flushed by a majority. A few keys are overwritten repeatedly
and removed at the end, so the metadata does not grow. The module knows no command and prints
nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.controllers.methods import DELETE_KVS, LIST_KVS, PUT_KVS
from streammeta.client.errors import BrokerClientError
from streammeta.v1 import kv_pb2

NAMESPACE = "streammeta.check-perf"
VALUE_BYTES = 256
IN_FLIGHT_MAX = 64
"""Maximum number of writes in flight, each to a different key."""

RATE_SHARE_MIN = 0.9
"""Minimum share of the requested rate that must be acknowledged."""
P99_MAX_MS = 100.0
SLOWEST_MAX_MS = 1_000.0

_LEFT_BEHIND_MS = 3_600_000
"""Age after which keys of another check are removed, because it ended without doing so."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load of `rate` values per second, for `duration_s` seconds."""

    rate: int
    duration_s: float

    @property
    def writes(self) -> int:
        """Number of all writes, at least one."""
        return max(1, round(self.rate * self.duration_s))


@dataclass(frozen=True, slots=True)
class Measured:
    """Latencies of acknowledged writes in ms, from their scheduled time, and failures as text."""

    latencies_ms: Sequence[float]
    failures: Sequence[str]
    elapsed_s: float

    def quantile_ms(self, share: float) -> float:
        """Return the latency that this share of the writes does not exceed, 0 without writes."""
        ranked = sorted(self.latencies_ms)
        return ranked[math.ceil(share * len(ranked)) - 1] if ranked else 0.0


@dataclass(frozen=True, slots=True)
class Judged:
    """One figure and its threshold."""

    name: str
    measured: float
    threshold: float
    passed: bool


def judge(load: Load, measured: Measured) -> Sequence[Judged]:
    """Return the verdict on each figure. The check passes if all pass."""
    acknowledged = len(measured.latencies_ms)
    # A run that ends a little early must not show a higher rate than the requested one.
    rate = acknowledged / max(measured.elapsed_s, load.duration_s)
    wanted = RATE_SHARE_MIN * load.writes / load.duration_s
    p99, slowest = measured.quantile_ms(0.99), measured.quantile_ms(1)
    failed = len(measured.failures)
    return (
        Judged("writes_per_s_at_least", round(rate, 1), round(wanted, 1), rate >= wanted),
        Judged("p99_ms_at_most", round(p99, 1), P99_MAX_MS, p99 <= P99_MAX_MS),
        Judged("slowest_ms_at_most", round(slowest, 1), SLOWEST_MAX_MS, slowest <= SLOWEST_MAX_MS),
        Judged("failed_writes_at_most", failed, 0, failed == 0),
    )


async def run(client: ControllerClient, load: Load) -> Measured:
    """Write, measure, and remove the written keys.

    Raises `BrokerClientError` if no write was acknowledged, or the keys could not be removed.
    """
    # Begins with the time, from which later checks see how old a key is.
    prefix = f"{time.time_ns() // 1_000_000:014d}-{secrets.token_hex(4)}/"
    await _remove(client, [key async for key in _left_behind(client)])
    # One key for each write in flight, so that no two writes meet at one key.
    keys = [f"{prefix}{i}" for i in range(min(IN_FLIGHT_MAX, load.writes))]
    # The first one finds the leader and connects, and is not measured.
    await _put(client, keys[0])
    try:
        return await _measure(client, load, keys)
    finally:
        await _remove(client, keys)


async def _measure(client: ControllerClient, load: Load, keys: Sequence[str]) -> Measured:
    latencies: list[float] = []
    failures: list[str] = []
    started = time.monotonic()
    # All writers share one schedule, so that a slow write delays no other.
    dues = (started + i / load.rate for i in itertools.count())
    turns = itertools.islice(dues, load.writes)

    async def write(key: str, turns: Iterator[float]) -> None:
        for due in turns:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            try:
                await _put(client, key)
            except BrokerClientError as error:
                failures.append(str(error))
            else:
                # Counted from the schedule: waiting for a free writer is part of what a client
                # sees.
                latencies.append((time.monotonic() - due) * 1000)

    await asyncio.gather(*(write(key, turns) for key in keys))
    return Measured(latencies, failures, time.monotonic() - started)


async def _put(client: ControllerClient, key: str) -> None:
    value = secrets.token_bytes(VALUE_BYTES)
    # With overwrite, a retry after an unknown outcome succeeds.
    item = kv_pb2.KVToPut(namespace=NAMESPACE, key=key, value=value, overwrite=True)
    await client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))


async def _remove(client: ControllerClient, keys: Sequence[str]) -> None:
    if keys:
        asked = [kv_pb2.KVKey(namespace=NAMESPACE, key=key) for key in keys]
        await client.call(DELETE_KVS, kv_pb2.DeleteKVsRequest(keys=asked))


async def _left_behind(client: ControllerClient) -> AsyncIterator[str]:
    """Yield one page of keys that earlier checks did not remove."""
    listed = await client.call(LIST_KVS, kv_pb2.ListKVsRequest(namespace=NAMESPACE, keys_only=True))
    # Younger keys may belong to a check that still runs.
    oldest = time.time_ns() // 1_000_000 - _LEFT_BEHIND_MS
    for entry in listed.entries:
        begun, _, _ = entry.key.partition("-")
        if begun.isdecimal() and int(begun) < oldest:
            yield entry.key
