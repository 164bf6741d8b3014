"""Policies of managed ledgers: set for a namespace, overridden for a topic, checked together.

The broker carries out retention, because only it knows the reads of its consumers. Retention is
checked here so that no accepted policy deletes a ledger before its offload. Does no I/O.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any
from urllib.parse import quote, unquote

from streammeta.brokers.pulsar.ledger_list import NEVER, OffloadPolicy
from streammeta.client import KeyValues
from streammeta.client.errors import KeyConflictError
from streammeta.client.parts import ControllerClient
from streammeta.storage.parsing import parse_json

_MOST = (1 << 63) - 1


class PolicyError(ValueError):
    """A policy is not valid. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class TopicPolicies:
    """Policies of topics. None means not set here, `NEVER` (-1) means without this bound.

    A closed ledger is offloaded `offload_after_s` after it was closed, and when it lies more than
    `offload_above_bytes` below the end of the closed ledgers. Its source is deleted
    `delete_source_after_s` after the offload. The broker deletes ledgers that are older than
    `retention_s`, or lie more than `retention_bytes` below the end.

    Raises:
        PolicyError: a value is not an integer from -1 on.
    """

    offload_after_s: int | None = None
    offload_above_bytes: int | None = None
    delete_source_after_s: int | None = None
    retention_s: int | None = None
    retention_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is None:
                continue
            # bool is a subclass of int.
            if isinstance(value, bool) or not isinstance(value, int):
                raise PolicyError(
                    f"{name} is {value!r}, expected an integer, -1 for never, or None"
                )
            if not NEVER <= value <= _MOST:
                raise PolicyError(f"{name} is {value}, expected -1 for never, or 0..{_MOST}")

    def override(self, other: TopicPolicies) -> TopicPolicies:
        """Return these policies, overridden by another one's values."""
        return replace(self, **other.values)

    @property
    def values(self) -> dict[str, int]:
        """The set values, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def offload(self) -> OffloadPolicy:
        """Policy for the managed ledger."""
        # The managed ledger knows only one form of "never".
        after_s = self.delete_source_after_s
        lag_ms = None if after_s is None or after_s < 0 else after_s * 1000
        return OffloadPolicy(self.offload_above_bytes, self.offload_after_s, lag_ms)

    def check(self) -> None:
        """Raise `PolicyError` if retention would delete a ledger before it is offloaded."""
        for offload, retention in (
            ("offload_after_s", "retention_s"),
            ("offload_above_bytes", "retention_bytes"),
        ):
            wanted, bound = getattr(self, offload), getattr(self, retention)
            # Bounds of the same kind can be compared. Other pairs are only warned about.
            if _is_bound(wanted) and _is_bound(bound) and wanted >= bound:
                raise PolicyError(
                    f"{offload} is {wanted}, expected less than {retention}, which is"
                    f" {bound}: retention would delete ledgers before they are offloaded"
                )

    @property
    def doubts(self) -> list[str]:
        """Warnings about bounds of different kinds, where retention may come first."""
        pairs = (
            ("offload_after_s", "offload_above_bytes", "retention_bytes"),
            ("offload_above_bytes", "offload_after_s", "retention_s"),
        )
        return [
            f"{retention} is {getattr(self, retention)} and {other} is not set: retention may"
            f" delete ledgers before {offload} is reached. Set {other} below {retention}"
            for offload, other, retention in pairs
            if _is_bound(getattr(self, offload))
            and not _is_bound(getattr(self, other))
            and _is_bound(getattr(self, retention))
        ]


def _is_bound(value: int | None) -> bool:
    return value is not None and value >= 0


NOTHING = TopicPolicies()
"""Policies that set nothing."""


@dataclass(frozen=True, slots=True)
class NamespacePolicies:
    """Policies of a namespace, and overrides of its topics."""

    common: TopicPolicies = NOTHING
    topics: Mapping[str, TopicPolicies] = field(default_factory=dict)

    def effective(self, topic: str) -> TopicPolicies:
        """Return the policies of a topic."""
        return self.common.override(self.topics.get(topic, NOTHING))

    def with_common(self, policies: TopicPolicies) -> NamespacePolicies:
        """Return a copy with other policies of the namespace. Overrides of topics stay."""
        return replace(self, common=policies)

    def with_topic(self, topic: str, policies: TopicPolicies) -> NamespacePolicies:
        """Return a copy with other overrides of a topic, or none if they set nothing."""
        # A topic without overrides has no entry.
        others = {name: kept for name, kept in self.topics.items() if name != topic}
        return replace(self, topics=others | ({topic: policies} if policies.values else {}))

    def check(self) -> None:
        """Raise `PolicyError`, naming the topic, if a topic's policies contradict each other."""
        for where, policies in self._all():
            try:
                policies.check()
            except PolicyError as error:
                raise PolicyError(f"{where}: {error}") from None

    @property
    def doubts(self) -> list[str]:
        """Warnings about the policies of the namespace and of its topics, with their names."""
        return [f"{where}: {doubt}" for where, policies in self._all() for doubt in policies.doubts]

    def _all(self) -> Iterator[tuple[str, TopicPolicies]]:
        # Topics without overrides have the same policies as the namespace.
        yield "the namespace", self.common
        for topic in self.topics:
            yield f"topic {topic}", self.effective(topic)

    def encode(self) -> bytes:
        """Return the policies as JSON."""
        # Unset values are left out, so that a topic follows later changes of its namespace.
        topics = {name: policies.values for name, policies in self.topics.items()}
        value = {"common": self.common.values, "topics": topics}
        return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> NamespacePolicies:
        """Return policies from JSON. Raise `PolicyError` for other bytes."""
        try:
            value = parse_json(data)
            topics = {name: _decode_policies(found) for name, found in value["topics"].items()}
            return cls(_decode_policies(value["common"]), topics)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PolicyError(f"stored policies can't be read: {error!r}") from error


def _decode_policies(value: Mapping[str, Any]) -> TopicPolicies:
    """Return policies without values that only a later version knows."""
    # A rolling upgrade must not make policies unreadable for the older version.
    known = {policy.name for policy in fields(TopicPolicies)}
    return TopicPolicies(**{name: found for name, found in value.items() if name in known})


# Policies of managed ledgers as keys of a cluster: one value for a namespace and its topics.
#
# A single value allows checking the policies of a namespace together with its topics' policies. A
# change is put at the version that was read and checked. If another change comes first, it reads
# and checks again.

NAMESPACE = "_pulsar_policies"
"""Namespace of the keys of all policies."""


@dataclass(frozen=True, slots=True)
class AllPolicies:
    """The policies of all namespaces. `unreadable` contains reasons by namespace."""

    namespaces: Mapping[str, NamespacePolicies] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def effective(self, namespace: str, topic: str) -> TopicPolicies:
        """Return the policies of a topic. Raise `PolicyError` if they can't be read."""
        if namespace in self.unreadable:
            raise PolicyError(self.unreadable[namespace])
        return self.namespaces.get(namespace, NamespacePolicies()).effective(topic)


class PolicyStore:
    """The policies of one Pulsar-shaped cluster."""

    def __init__(self, controllers: ControllerClient, cluster: str) -> None:
        self._kv = KeyValues(controllers)
        # Quoted, so that a slash in a name does not end it.
        self._prefix = f"{quote(cluster, safe='')}/"

    async def load(self) -> AllPolicies:
        """Return all policies. Raise errors of the controllers."""
        namespaces: dict[str, NamespacePolicies] = {}
        unreadable: dict[str, str] = {}
        async for entry in self._kv.list(self._prefix, namespace=NAMESPACE):
            name = unquote(entry.key.removeprefix(self._prefix))
            try:
                namespaces[name] = NamespacePolicies.decode(entry.value)
            except PolicyError as error:
                advice = "Use the version that wrote them, or delete the key"
                # One damaged value must not stop the offload of all other namespaces.
                unreadable[name] = f"key {entry.key!r}: {error}. {advice}"

        return AllPolicies(namespaces, unreadable)

    async def get(self, namespace: str) -> NamespacePolicies:
        """Return the policies of a namespace. Raise `PolicyError` if they can't be read."""
        return (await self._get(namespace))[0]

    async def set_namespace(self, namespace: str, policies: TopicPolicies) -> list[str]:
        """Replace the policies of a namespace. Return warnings about them, as sentences.

        Raises:
            PolicyError: retention would delete ledgers of the namespace, or of one of its topics,
                before they are offloaded. Nothing was changed.
        """
        return await self._change(namespace, lambda found: found.with_common(policies))

    async def set_topic(self, namespace: str, topic: str, policies: TopicPolicies) -> list[str]:
        """Replace the overrides of a topic. Return and raise as `set_namespace`."""
        return await self._change(namespace, lambda found: found.with_topic(topic, policies))

    async def _change(
        self, namespace: str, change: Callable[[NamespacePolicies], NamespacePolicies]
    ) -> list[str]:
        # Another writer may win each attempt. The check is repeated on its policies.
        while True:
            found, version = await self._get(namespace)
            changed = change(found)
            changed.check()
            with contextlib.suppress(KeyConflictError):
                await self._kv.put(
                    self._key(namespace),
                    changed.encode(),
                    namespace=NAMESPACE,
                    expected_version=version,
                )
                return changed.doubts

    async def _get(self, namespace: str) -> tuple[NamespacePolicies, int]:
        found = await self._kv.get(self._key(namespace), namespace=NAMESPACE)
        if found is None:
            # Version 0 stands for an absent key.
            return NamespacePolicies(), 0
        return NamespacePolicies.decode(found.value), found.version

    def _key(self, namespace: str) -> str:
        return self._prefix + quote(namespace, safe="")
