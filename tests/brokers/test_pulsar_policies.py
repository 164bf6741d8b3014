"""Policies of managed ledgers: of a namespace and its topics, against retention, as keys."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streammeta.brokers.pulsar.ledger_list import NEVER, OffloadPolicy
from streammeta.brokers.pulsar.policies import (
    NAMESPACE,
    NOTHING,
    NamespacePolicies,
    PolicyError,
    PolicyStore,
    TopicPolicies,
)
from tests.kit.memory_keys import MemoryControllers


def _store(controllers: MemoryControllers, cluster: str = "c") -> PolicyStore:
    return PolicyStore(controllers, cluster)  # type: ignore[arg-type]


def test_a_topic_overrides_single_values_of_its_namespace() -> None:
    common = TopicPolicies(offload_after_s=60, offload_above_bytes=1000, delete_source_after_s=5)
    policies = NamespacePolicies(common, {"t": TopicPolicies(offload_after_s=NEVER)})
    assert policies.effective("other") == common
    found = policies.effective("t")
    assert found.values == common.values | {"offload_after_s": NEVER}
    assert found.offload == OffloadPolicy(1000, NEVER, 5000)
    assert TopicPolicies().offload == OffloadPolicy()
    assert TopicPolicies(delete_source_after_s=NEVER).offload.deletion_lag_ms is None


@pytest.mark.parametrize(
    ("offload", "retention"),
    [("offload_after_s", "retention_s"), ("offload_above_bytes", "retention_bytes")],
)
@pytest.mark.parametrize(
    ("wanted", "bound", "is_valid"),
    [
        (59, 60, True),
        (60, 60, False),
        (61, 60, False),
        (0, 0, False),
        (10, NEVER, True),
        (NEVER, 0, True),
        (None, 0, True),
        (10, None, True),
    ],
)
def test_retention_does_not_delete_before_the_offload(
    offload: str, retention: str, wanted: int | None, bound: int | None, is_valid: bool
) -> None:
    values: Any = {offload: wanted, retention: bound}
    policies = TopicPolicies(**values)
    if is_valid:
        policies.check()
    else:
        with pytest.raises(PolicyError, match=f"{offload}.*{wanted}.*{retention}"):
            policies.check()


def test_bounds_of_two_kinds_are_doubted() -> None:
    by_time = TopicPolicies(offload_after_s=60, retention_bytes=1000)
    assert "Set offload_above_bytes below retention_bytes" in by_time.doubts[0]
    by_size = TopicPolicies(offload_above_bytes=60, retention_s=1000)
    assert "Set offload_after_s below retention_s" in by_size.doubts[0]
    both = TopicPolicies(offload_after_s=1, offload_above_bytes=1, retention_s=2, retention_bytes=2)
    for policies in (both, NOTHING, TopicPolicies(offload_after_s=60, retention_bytes=NEVER)):
        assert policies.doubts == []


@pytest.mark.parametrize("value", [True, 1.5, "60", -2, 1 << 63])
def test_a_value_that_can_not_be_is_named(value: Any) -> None:
    with pytest.raises(PolicyError, match="retention_s is"):
        TopicPolicies(retention_s=value)


# ---- keys ----


async def test_policies_are_read_back_by_all_brokers() -> None:
    controllers = MemoryControllers()
    store = _store(controllers)
    common = TopicPolicies(offload_after_s=60, retention_s=3600)
    assert await store.set_namespace("tenant/a b", common) == []
    doubts = await store.set_topic("tenant/a b", "t", TopicPolicies(retention_bytes=9))
    assert len(doubts) == 1
    assert doubts[0].startswith("topic t: retention_bytes is 9")
    await store.set_namespace("other", TopicPolicies(offload_above_bytes=7))
    found = await _store(controllers).load()
    assert set(found.namespaces) == {"tenant/a b", "other"}
    assert found.effective("tenant/a b", "t").values == common.values | {"retention_bytes": 9}
    assert found.effective("tenant/a b", "u") == common
    assert found.effective("absent", "t") == NOTHING
    assert (await _store(controllers, "another").load()).namespaces == {}
    await store.set_topic("tenant/a b", "t", NOTHING)
    assert (await store.get("tenant/a b")).topics == {}


async def test_a_policy_that_contradicts_retention_changes_nothing() -> None:
    controllers = MemoryControllers()
    store = _store(controllers)
    await store.set_namespace("n", TopicPolicies(offload_after_s=60))
    await store.set_topic("n", "t", TopicPolicies(retention_s=100))
    before = dict(controllers.stored)
    with pytest.raises(PolicyError, match=r"offload_after_s.*100"):
        await store.set_namespace("n", TopicPolicies(offload_after_s=100))
    with pytest.raises(PolicyError, match=r"offload_after_s.*60"):
        await store.set_topic("n", "u", TopicPolicies(retention_s=60))
    assert controllers.stored == before


async def test_changes_of_two_operators_are_checked_together() -> None:
    """Each is valid by itself; the second one reads again what the first has put."""
    controllers = MemoryControllers()
    store = _store(controllers)
    await store.set_namespace("n", TopicPolicies(offload_after_s=10))

    def meanwhile() -> None:
        other = NamespacePolicies(TopicPolicies(offload_after_s=500))
        ((at, (_, version)),) = controllers.stored.items()
        controllers.stored[at] = other.encode(), version + 100

    controllers.before["PutKVs"] = meanwhile
    with pytest.raises(PolicyError, match=r"offload_after_s.*500"):
        await store.set_topic("n", "t", TopicPolicies(retention_s=100))

    await asyncio.gather(
        *(store.set_topic("n", f"t{at}", TopicPolicies(retention_bytes=at)) for at in range(9))
    )
    assert len((await store.get("n")).topics) == 9


async def test_policies_that_can_not_be_read_are_named_and_hide_no_others() -> None:
    controllers = MemoryControllers()
    store = _store(controllers)
    await store.set_namespace("good", TopicPolicies(offload_after_s=1))
    for at, data in enumerate((b"{", b"[]", b'{"common":{"retention_s":"x"},"topics":{}}')):
        controllers.stored[NAMESPACE, f"c/bad{at}"] = data, 7
    found = await store.load()
    assert found.effective("good", "t").offload_after_s == 1
    assert set(found.unreadable) == {"bad0", "bad1", "bad2"}
    with pytest.raises(PolicyError, match="'c/bad1'"):
        found.effective("bad1", "t")
    with pytest.raises(PolicyError):
        await store.get("bad0")


def test_values_of_a_later_version_are_left_out() -> None:
    data = b'{"common":{"offload_after_s":1,"later":2},"topics":{"t":{"later":3}},"later":4}'
    policies = NamespacePolicies.decode(data)
    assert policies.effective("t") == TopicPolicies(offload_after_s=1)
