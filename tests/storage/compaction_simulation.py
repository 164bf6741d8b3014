"""One node's set objects on a virtual clock: who is compacted when, and what is written for it.

An object is its bytes of each stream. Uploads come at a fixed pace; a policy is asked at a fixed
interval and its groups are carried out at once, as the planner would: a stream with more than the
split size of the group leaves as a stream object, the others stay together in a new set object.
Counts the bytes written for each stream. Has no real object, index or map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from streammeta.storage.compaction.selection import (
    MIB,
    Group,
    GroupKind,
    SelectionConfig,
    SetObjects,
    select_set_objects,
)

_INDEX_ENTRY, _FOOTER = 36, 48
_AUTOMQ_SPLIT_AFTER_MS = 120 * 60_000

Policy: TypeAlias = Callable[[SetObjects, int], Sequence[Group]]


@dataclass(slots=True)
class SimulatedObject:
    """A set object: the bytes it has of each stream."""

    object_id: int
    order_id: int
    data_time_ms: int
    held: NDArray[np.int64]

    @property
    def row(self) -> tuple[int, int, int, int, int]:
        """What the map tells of it."""
        ranges = int(np.count_nonzero(self.held))
        size = int(self.held.sum()) + ranges * _INDEX_ENTRY + _FOOTER
        return self.object_id, self.order_id, self.data_time_ms, size, ranges


@dataclass(slots=True)
class SimulatedNode:
    """A broker that uploads `rates` bytes a second of each stream and compacts by a policy."""

    rates: NDArray[np.int64]
    policy: Policy
    upload_every_s: int = 60
    compact_every_s: int = 300
    now_s: int = 0
    objects: list[SimulatedObject] = field(default_factory=list)
    stream_objects: list[tuple[int, int]] = field(default_factory=list)
    """Stream and bytes of each."""
    rewritten: NDArray[np.int64] = field(init=False)
    """Bytes that compactions wrote of each stream."""
    uploaded: NDArray[np.int64] = field(init=False)
    most_objects: int = 0
    """Most that were left by a compaction."""
    oldest_s: int = 0
    """Greatest age of an object that a compaction left."""
    _next_id: int = 0

    def __post_init__(self) -> None:
        self.rewritten = np.zeros_like(self.rates)
        self.uploaded = np.zeros_like(self.rates)

    def run(self, hours: float, uploads: Callable[[int], bool] = lambda _second: True) -> None:
        """Let time pass; `uploads` says in which seconds the node has anything to upload."""
        for _ in range(int(hours * 3600)):
            self.now_s += 1
            if self.now_s % self.upload_every_s == 0 and uploads(self.now_s):
                self._upload()
            if self.now_s % self.compact_every_s == 0:
                self.compact()

    def compact(self) -> None:
        """Ask the policy and do as it says."""
        rows = SetObjects.of_rows(each.row for each in self.objects)
        for group in self.policy(rows, self.now_s * 1000):
            self._carry_out(group)
        self.most_objects = max(self.most_objects, len(self.objects))
        ages = [self.now_s - each.data_time_ms // 1000 for each in self.objects]
        self.oldest_s = max([self.oldest_s, *ages])

    def amplification(self) -> NDArray[np.float64]:
        """Return how often each stream's bytes were rewritten."""
        return self.rewritten / np.maximum(self.uploaded, 1)

    def _upload(self) -> None:
        held = self.rates * self.upload_every_s
        self.uploaded += held
        self._next_id += 1
        self.objects.append(SimulatedObject(self._next_id, self._next_id, self.now_s * 1000, held))

    def _carry_out(self, group: Group) -> None:
        wanted = set(group.object_ids)
        sources = [each for each in self.objects if each.object_id in wanted]
        assert len(sources) == len(group.object_ids), "a group names objects that are there"
        held = np.sum([each.held for each in sources], axis=0)
        self.rewritten += held
        leave = held > group.split_size
        self.stream_objects += [(int(at), int(held[at])) for at in np.flatnonzero(leave)]
        place = self.objects.index(sources[0])
        assert self.objects[place : place + len(sources)] == sources, "a group is of neighbours"
        self._next_id += 1
        rest = SimulatedObject(
            self._next_id,
            min(each.order_id for each in sources),
            min(each.data_time_ms for each in sources),
            np.where(leave, 0, held),
        )
        self.objects[place : place + len(sources)] = [rest] if rest.held.any() else []


def streammeta_policy(config: SelectionConfig | None = None) -> Policy:
    """Return the product's policy."""
    chosen = config or SelectionConfig()
    return lambda objects, now_ms: select_set_objects(objects, chosen, now_ms).groups


def automq_policy(objects: SetObjects, now_ms: int) -> list[Group]:
    """Merge all that are younger than 120 minutes whenever asked; split every other one alone."""
    ids, sizes = objects.object_id.tolist(), objects.object_size.tolist()
    old = (now_ms - objects.data_time_ms >= _AUTOMQ_SPLIT_AFTER_MS).tolist()
    rows = list(zip(ids, sizes, old, strict=True))
    splits = [Group(GroupKind.SPLIT, (each,), 0, size) for each, size, is_old in rows if is_old]
    young = [(each, size) for each, size, is_old in rows if not is_old]
    if len(young) < 2:
        return splits
    together = tuple(each for each, _ in young)
    size = sum(size for _, size in young)
    return [*splits, Group(GroupKind.MERGE, together, 8 * MIB, size)]
