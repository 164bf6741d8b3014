"""Policies of managed ledgers: set for a namespace, overridden for a topic, checked together.

Retention is the broker's, which alone knows what its consumers have read. It is here so that no
policy is accepted by which a ledger would be deleted before it is offloaded. Does no I/O.
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
    """A policy is not valid; nothing was changed."""


@dataclass(frozen=True, slots=True)
class TopicPolicies:
    """Policies of topics. None: not set here; `NEVER`, -1: without such a bound.

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
            if isinstance(value, bool) or not isinstance(value, int):
                raise PolicyError(f"{name} is {value!r}, wanted an integer, -1 for never, or None")
            if not NEVER <= value <= _MOST:
                raise PolicyError(f"{name} is {value}, wanted -1 for never, or 0..{_MOST}")

    def overridden_by(self, other: TopicPolicies) -> TopicPolicies:
        """Return these policies, with the values that others set in their place."""
        return replace(self, **other.values)

    @property
    def values(self) -> dict[str, int]:
        """The values that are set, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def offload(self) -> OffloadPolicy:
        """The policy that a managed ledger carries out."""
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
            if _is_bound(wanted) and _is_bound(bound) and wanted >= bound:
                raise PolicyError(
                    f"{offload} is {wanted}, wanted less than {retention}, which is {bound}:"
                    " retention would delete ledgers before they are offloaded"
                )

    @property
    def doubts(self) -> list[str]:
        """Sentences about bounds of two kinds, of which the one of retention may be met first."""
        pairs = (
            ("offload_after_s", "offload_above_bytes", "retention_bytes"),
            ("offload_above_bytes", "offload_after_s", "retention_s"),
        )
        return [
            f"{retention} is {getattr(self, retention)} and {other} is not set: retention may"
            f" delete ledgers before {offload} is reached; set {other} below {retention}"
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
    """Policies of a namespace, and those of its topics that override them."""

    common: TopicPolicies = NOTHING
    topics: Mapping[str, TopicPolicies] = field(default_factory=dict)

    def effective(self, topic: str) -> TopicPolicies:
        """Return the policies of a topic."""
        return self.common.overridden_by(self.topics.get(topic, NOTHING))

    def with_common(self, policies: TopicPolicies) -> NamespacePolicies:
        """Return other policies of the namespace; those of topics stay."""
        return replace(self, common=policies)

    def with_topic(self, topic: str, policies: TopicPolicies) -> NamespacePolicies:
        """Return other policies of a topic, without any if they set nothing."""
        others = {name: kept for name, kept in self.topics.items() if name != topic}
        return replace(self, topics=others | ({topic: policies} if policies.values else {}))

    def check(self) -> None:
        """Raise `PolicyError` if a topic's policies contradict each other; it names the topic."""
        for where, policies in self._all():
            try:
                policies.check()
            except PolicyError as error:
                raise PolicyError(f"{where}: {error}") from None

    @property
    def doubts(self) -> list[str]:
        """Doubts about the policies of the namespace and of its topics, which are named."""
        return [f"{where}: {doubt}" for where, policies in self._all() for doubt in policies.doubts]

    def _all(self) -> Iterator[tuple[str, TopicPolicies]]:
        yield "the namespace", self.common
        for topic in self.topics:
            yield f"topic {topic}", self.effective(topic)

    def encode(self) -> bytes:
        """Return the policies as JSON."""
        topics = {name: policies.values for name, policies in self.topics.items()}
        value = {"common": self.common.values, "topics": topics}
        return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> NamespacePolicies:
        """Return policies from JSON; raise `PolicyError` if the bytes are none."""
        try:
            value = parse_json(data)
            topics = {name: _decoded(found) for name, found in value["topics"].items()}
            return cls(_decoded(value["common"]), topics)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PolicyError(f"stored policies can't be read: {error!r}") from error


def _decoded(value: Mapping[str, Any]) -> TopicPolicies:
    """Return policies; values that a later version has added are left out."""
    known = {one.name for one in fields(TopicPolicies)}
    return TopicPolicies(**{name: found for name, found in value.items() if name in known})
