"""Policies of managed ledgers as keys of a cluster: one value for a namespace and its topics.

A single value allows checking the policies of a namespace together with its topics' policies. A
change is put at the version that was read and checked. If another change comes first, it reads and
checks again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from streammeta.brokers.pulsar.policies import NamespacePolicies, PolicyError, TopicPolicies
from streammeta.client import KeyValues
from streammeta.client.errors import KeyConflictError
from streammeta.client.parts import ControllerClient

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
