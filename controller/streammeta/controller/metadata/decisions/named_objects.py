"""Named objects: objects without stream data, found by names that brokers chose.

The object itself is in the registry of objects under an id prepared like any other, and its bytes
are stored under the key of that id. Expiry, deletion, backups and reconciliation therefore need no
names. A name is a key in a reserved namespace, and its value describes the object. A second key
maps the owner, a stream or a key, to the name. All of them change in one log entry, so that names
without objects and objects without names are impossible.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from streammeta.controller.errors import ErrorCode, LimitExceededError
from streammeta.controller.metadata.api import answer_budget as budget
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.answers import ErrorsAnswer
from streammeta.controller.metadata.api.named_answers import (
    NAMES,
    OWNERS,
    DeleteNamedObjectsAnswer,
    DescribeNamedObjectsAnswer,
    NamedObject,
)
from streammeta.controller.metadata.decisions.commit_rules import REJECTED, Repeat, Repeats
from streammeta.controller.metadata.registries.cluster_modes import FeatureLevel
from streammeta.controller.metadata.registries.kv import KVs
from streammeta.controller.metadata.registries.nodes import Nodes
from streammeta.controller.metadata.registries.object_descriptions import ObjectDescriptions
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.metadata.tables.values import EMPTY_COLUMN, Tags, column, page_size
from streammeta.controller.records import record as rec
from streammeta.rpc.method_rows import NAMED_OBJECTS_MAX

NAMED_LEVEL = 3
"""Feature level from which named objects exist."""

PER_OWNER_MAX = 100_000
"""Maximum number of named objects of one owner. Each has two of the cluster's keys."""

AT_ONCE_MAX = NAMED_OBJECTS_MAX
"""Maximum number of objects that one deletion by owner destroys."""

AT_ONCE_BYTES_MAX = 1 << 20
"""Size of their keys from which on it destroys no further one, in bytes."""

WITH_OWNERS_MAX = 10_000
"""Maximum number of named objects destroyed with their owners in one request."""

_NONE = ErrorCode.NONE


@dataclass(frozen=True, slots=True)
class _Entry:
    """Value of a name."""

    object_id: int
    owner_stream_id: int
    owner_key: requests.OwnerKey | None
    metadata: Tags

    def encode(self) -> bytes:
        content: dict[str, Any] = {"id": self.object_id, "tags": self.metadata}
        if self.owner_key is None:
            content["stream"] = self.owner_stream_id
        else:
            content["key"] = [self.owner_key.namespace, self.owner_key.key]
        # The form is canonical, because the digest of a commit covers it.
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> "_Entry":
        content = json.loads(value)
        return cls(
            object_id=content["id"],
            owner_stream_id=content.get("stream", -1),
            owner_key=requests.OwnerKey(*content["key"]) if "key" in content else None,
            metadata=tuple((key, text) for key, text in content["tags"]),
        )

    def owner_prefix(self) -> str:
        if self.owner_key is None:
            return _of_stream(self.owner_stream_id)
        return _of_key(self.owner_key.namespace, self.owner_key.key)


def _of_stream(stream_id: int) -> str:
    return f"stream/{stream_id}/"


def _of_key(namespace: str, key: str) -> str:
    # The lengths keep one owner's prefix from being the beginning of another's.
    return f"key/{len(namespace)}/{len(key)}/{namespace}/{key}/"


@dataclass(eq=False)
class NamedObjects:
    """Decisions and queries about named objects. Replay is up to keys and objects."""

    _nodes: Nodes
    _streams: Streams
    _objects: ObjectDescriptions
    _kvs: KVs
    _repeats: Repeats
    _level: FeatureLevel

    # ---- deciding ----

    def decide_commit(
        self, request: requests.CommitNamedObjects, now_ms: int
    ) -> tuple[Sequence[rec.Record], ErrorsAnswer]:
        """Commit all objects or none. Already committed ones count as new ones.

        Raises:
            FeatureLevelError: the cluster is below `NAMED_LEVEL`.
            LimitExceededError: an owner would have too many objects.
        """
        self._level.require(NAMED_LEVEL, "named objects")
        error = self._nodes.check(request.node)
        if error is not _NONE:
            return (), ErrorsAnswer(errors=(error,) * len(request.objects))

        digests = [_digest(item) for item in request.objects]
        repeats = [
            self._repeats.compare_object(item.object_id, digest)
            for item, digest in zip(request.objects, digests, strict=True)
        ]
        errors = tuple(map(self._verdict, request.objects, repeats))

        fresh = [place for place, repeat in enumerate(repeats) if repeat is Repeat.NEW]
        if any(errors) or not fresh:
            return (), ErrorsAnswer(errors=errors)

        chosen = [request.objects[place] for place in fresh]
        self._require_room(chosen)
        records = self._commit_records(chosen, [digests[place] for place in fresh], now_ms)
        return records, ErrorsAnswer(errors=errors)

    def _verdict(self, item: requests.NamedObjectToCommit, repeat: Repeat) -> ErrorCode:
        if repeat is Repeat.SAME:
            return _NONE
        if repeat in REJECTED:
            return REJECTED[repeat]
        if self._kvs.value_of(NAMES, item.name) is not None:
            return ErrorCode.KEY_EXIST
        if item.owner_key is None:
            exists = self._streams.heads([item.owner_stream_id])[0] is not None
            return _NONE if exists else ErrorCode.STREAM_NOT_EXIST
        owner = self._kvs.value_of(item.owner_key.namespace, item.owner_key.key)
        return _NONE if owner is not None else ErrorCode.KEY_NOT_EXIST

    def _require_room(self, items: Sequence[requests.NamedObjectToCommit]) -> None:
        self._objects.require_room(0, column([item.object_size for item in items]))
        added: dict[str, int] = {}
        for item in items:
            prefix = _entry(item).owner_prefix()
            added[prefix] = added.get(prefix, 0) + 1

        for prefix, count in added.items():
            has = self._kvs.count(OWNERS, prefix)
            if has + count > PER_OWNER_MAX:
                raise LimitExceededError(
                    f"objects: {prefix} has {has} named objects, at most {PER_OWNER_MAX} of one "
                    "owner: delete some, or let several keys own them",
                    "objects",
                    PER_OWNER_MAX,
                )

    def _commit_records(
        self,
        items: Sequence[requests.NamedObjectToCommit],
        digests: Sequence[int],
        now_ms: int,
    ) -> Sequence[rec.Record]:
        crc32c = [item.crc32c for item in items]
        entries = [_entry(item) for item in items]
        names = [item.name for item in items]
        owners = [entry.owner_prefix() + name for entry, name in zip(entries, names, strict=True)]
        return (
            rec.NamedObjectsCommitted(
                committed_at_ms=now_ms,
                object_id=column([item.object_id for item in items]),
                object_size=column([item.object_size for item in items]),
                crc32c=column(crc32c) if max(crc32c) >= 0 else EMPTY_COLUMN,
                content_digest=column(digests),
            ),
            rec.KVsPut(
                namespaces=(NAMES,) * len(items) + (OWNERS,) * len(items),
                keys=(*names, *owners),
                values=(*(entry.encode() for entry in entries), *((b"",) * len(items))),
            ),
        )

    def decide_delete(
        self, request: requests.DeleteNamedObjects, now_ms: int
    ) -> tuple[Sequence[rec.Record], DeleteNamedObjectsAnswer]:
        """Destroy the objects whose condition holds, or the first ones of an owner."""
        error = self._nodes.check(request.node)
        if error is not _NONE:
            return (), DeleteNamedObjectsAnswer(errors=(error,) * max(1, len(request.objects)))

        prefix = _owner_of(request)
        if request.objects:
            found = [self._entry_of(item.name) for item in request.objects]
            errors = tuple(
                _delete_verdict(item, entry, prefix)
                for item, entry in zip(request.objects, found, strict=True)
            )
            judged = zip(request.objects, errors, strict=True)
            names = [item.name for item, error in judged if not error]
        else:
            errors, names = (), self._first_names_of(prefix)

        remaining = self._kvs.count(OWNERS, prefix) - len(names) if prefix else 0
        key = request.owner_key
        # Only with its last object: a repeat must not delete a key that was put again since.
        is_last = request.with_owner_key and key is not None and bool(names) and not remaining
        records = self._destruction(names, now_ms, key if is_last else None)
        return records, DeleteNamedObjectsAnswer(
            errors=errors, remaining=remaining, owner_key_deleted=is_last
        )

    def _first_names_of(self, prefix: str) -> list[str]:
        """Return the first names of an owner, as many as one log entry destroys."""
        names, left = [], AT_ONCE_BYTES_MAX
        for name in itertools.islice(self._names_of(prefix), AT_ONCE_MAX):
            names.append(name)
            left -= len(prefix) + 2 * len(name)
            if left <= 0:
                break
        return names

    def destroy_with_streams(self, stream_ids: Iterable[int], now_ms: int) -> Sequence[rec.Record]:
        """Return the records that destroy the objects of deleted streams.

        Raises:
            LimitExceededError: there are too many for one request.
        """
        return self._destroy_with(map(_of_stream, stream_ids), now_ms)

    def destroy_with_keys(
        self, keys: Iterable[tuple[str, str]], now_ms: int
    ) -> Sequence[rec.Record]:
        """Return the records that destroy the objects of deleted keys. Raises as for streams."""
        return self._destroy_with((_of_key(*key) for key in keys), now_ms)

    def _destroy_with(self, prefixes: Iterable[str], now_ms: int) -> Sequence[rec.Record]:
        # Most clusters have no named objects, and deletions must not pay for them.
        if not self._kvs.has_any(OWNERS):
            return ()
        owned = itertools.chain.from_iterable(map(self._names_of, prefixes))
        names = list(itertools.islice(owned, WITH_OWNERS_MAX + 1))

        if len(names) > WITH_OWNERS_MAX:
            raise LimitExceededError(
                f"more than {WITH_OWNERS_MAX} named objects would be deleted with their owners: "
                "delete fewer at once, or first the named objects, by DeleteNamedObjects",
                "owners",
                WITH_OWNERS_MAX,
            )
        return self._destruction(names, now_ms)

    def _destruction(
        self, names: Sequence[str], now_ms: int, owner_key: requests.OwnerKey | None = None
    ) -> Sequence[rec.Record]:
        """Return the records that destroy objects, and delete the key of their owner if given."""
        if not names:
            return ()
        entries = [_Entry.decode(self._kvs.value_of(NAMES, name) or b"") for name in names]
        owners = [entry.owner_prefix() + name for entry, name in zip(entries, names, strict=True)]
        namespaces, keys = (NAMES,) * len(names) + (OWNERS,) * len(names), (*names, *owners)
        if owner_key is not None:
            namespaces, keys = (*namespaces, owner_key.namespace), (*keys, owner_key.key)
        return (
            rec.KVsDeleted(namespaces=namespaces, keys=keys),
            rec.ObjectsDestroyed(
                object_id=column(sorted(entry.object_id for entry in entries)),
                marked_at_ms=now_ms,
                deep=False,
            ),
        )

    # ---- reading ----

    def describe(self, request: requests.DescribeNamedObjects) -> DescribeNamedObjectsAnswer:
        """Return one page. A token is the last name of a page."""
        token = request.page.page_token
        if request.names:
            names: Iterable[str] = sorted({name for name in request.names if name > token})
        else:
            after = max(request.prefix, token)
            listed = self._kvs.keys_from(NAMES, after, request.prefix)
            names = (name for name in listed if name != token)

        found = (
            self._describe(name, entry)
            for name in names
            if (entry := self._entry_of(name)) is not None
        )

        objects, following = budget.page_of(found, page_size(request.page), budget.named_bytes)
        last = "" if following is None else objects[-1].name
        return DescribeNamedObjectsAnswer(objects=objects, next_page_token=last)

    def _describe(self, name: str, entry: _Entry) -> NamedObject:
        described = self._objects.describe(int(self._objects.rows(column([entry.object_id]))[0]))
        return NamedObject(
            name=name,
            object_id=entry.object_id,
            object_size=described.object_size,
            crc32c=described.crc32c,
            committed_at_ms=described.timestamp_ms,
            owner_stream_id=entry.owner_stream_id,
            owner_key=entry.owner_key,
            metadata=entry.metadata,
        )

    def _entry_of(self, name: str) -> _Entry | None:
        value = self._kvs.value_of(NAMES, name)
        return None if value is None else _Entry.decode(value)

    def _names_of(self, prefix: str) -> Iterator[str]:
        return (key.removeprefix(prefix) for key in self._kvs.keys_from(OWNERS, prefix, prefix))


def _owner_of(request: requests.DeleteNamedObjects) -> str:
    """Return the prefix of a requested owner, empty without one."""
    if request.owner_key is not None:
        return _of_key(request.owner_key.namespace, request.owner_key.key)
    return _of_stream(request.owner_stream_id) if request.owner_stream_id >= 0 else ""


def _delete_verdict(
    item: requests.NamedObjectToDelete, entry: _Entry | None, prefix: str
) -> ErrorCode:
    # An object of another owner is none of the requested owner's.
    if entry is None or (prefix and entry.owner_prefix() != prefix):
        return ErrorCode.OBJECT_NOT_EXIST
    return _NONE if item.object_id in (None, entry.object_id) else ErrorCode.KEY_EXIST


def _entry(item: requests.NamedObjectToCommit) -> _Entry:
    metadata = tuple(sorted(item.metadata))
    return _Entry(item.object_id, item.owner_stream_id, item.owner_key, metadata)


def _digest(item: requests.NamedObjectToCommit) -> int:
    """Return a number, never 0, that identifies the content of a commit."""
    content = [item.name, item.object_size, item.crc32c, _entry(item).encode().decode()]
    state = hashlib.blake2b(json.dumps(content).encode(), digest_size=8)
    return int.from_bytes(state.digest(), "little", signed=True) or 1
