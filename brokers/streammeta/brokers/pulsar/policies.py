"""Policies of managed ledgers: set for a namespace, overridden for a topic, checked together.

The broker carries out retention, because only it knows the reads of its consumers. Retention is
checked here so that no accepted policy deletes a ledger before its offload. Does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from streammeta.brokers.pulsar.ledger_list import NEVER, OffloadPolicy
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
