"""Keys and values, in namespaces, with versions.

A version is the log offset of the record that wrote the value, plus 1, so 0 denotes an absent key.
Keys are in order, in runs of bounded length, such that neither a change nor a page of a listing
examines all of them. This registry does not depend on the others.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import answer_budget as budget
from streammeta.controller.metadata.api.answers import (
    KVEntry,
    KVResult,
    KVResultsAnswer,
    ListKVsAnswer,
)
from streammeta.controller.metadata.api.requests import DeleteKVs, GetKVs, KVToPut, ListKVs, PutKVs
from streammeta.controller.metadata.registries.limits import kv_bytes
from streammeta.controller.metadata.tables.shared_views import SharedDict, SharedDictView
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.metadata.tables.values import page_size
from streammeta.controller.records.record import KVsDeleted, KVsPut

Key: TypeAlias = tuple[str, str]

RUN_KEYS = 1_024
"""Maximum number of keys in a run. A full one is split in two."""


class SortedKeys:
    """A sorted set of keys."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        ordered, size = sorted(keys), RUN_KEYS // 2
        self._runs = [ordered[first : first + size] for first in range(0, len(ordered), size)]
        self._firsts = [run[0] for run in self._runs]

    def add(self, key: Key) -> None:
        """Add a new key."""
        if not self._runs:
            self._runs, self._firsts = [[key]], [key]
            return
        number = self._number(key)
        run = self._runs[number]
        bisect.insort(run, key)
        if len(run) > RUN_KEYS:
            # Bounded runs keep insertions cheap however many keys exist.
            half = len(run) // 2
            self._runs.insert(number + 1, run[half:])
            self._firsts.insert(number + 1, run[half])
            del run[half:]
        self._firsts[number] = run[0]

    def remove(self, key: Key) -> None:
        """Remove an existing key."""
        number = self._number(key)
        run = self._runs[number]
        del run[bisect.bisect_left(run, key)]
        if run:
            self._firsts[number] = run[0]
        else:
            del self._runs[number], self._firsts[number]

    def at_or_above(self, key: Key) -> Iterator[Key]:
        """Yield the keys from `key` on, in order. The set must not change meanwhile."""
        number = self._number(key)
        for run in self._runs[number : number + 1]:
            yield from run[bisect.bisect_left(run, key) :]
        for run in self._runs[number + 1 :]:
            yield from run

    def count(self, key: Key, end: Key) -> int:
        """Return the number of keys from `key` on and before `end`."""
        return max(0, self._place(end) - self._place(key))

    def _place(self, key: Key) -> int:
        """Return the number of smaller keys."""
        if not self._runs:
            return 0
        number = self._number(key)
        return sum(map(len, self._runs[:number])) + bisect.bisect_left(self._runs[number], key)

    def _number(self, key: Key) -> int:
        """Return the number of the run that a key belongs to."""
        return max(0, bisect.bisect_right(self._firsts, key) - 1)


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value and its version."""

    value: bytes
    version: int


class KVs:
    """Values by (namespace, key)."""

    def __init__(self) -> None:
        self._values: SharedDict[tuple[str, str], StoredValue] = SharedDict()
        self._keys = SortedKeys()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nbytes(self) -> int:
        """Sizes of all keys and values, as limits count them."""
        return self._bytes

    def size_of(self, namespace: str, key: str) -> int:
        """Return the size of a key and its value, or -1 if it does not exist."""
        stored = self._values.get((namespace, key))
        return -1 if stored is None else kv_bytes(namespace, key, stored.value)

    def value_of(self, namespace: str, key: str) -> bytes | None:
        """Return the value of a key, or None if it does not exist."""
        stored = self._values.get((namespace, key))
        return None if stored is None else stored.value

    def keys_from(self, namespace: str, key: str, prefix: str) -> Iterator[str]:
        """Yield a namespace's keys with a prefix, in order, from `key` on."""
        for found in self._keys.at_or_above((namespace, key)):
            if found[0] != namespace or not found[1].startswith(prefix):
                return
            yield found[1]

    def count(self, namespace: str, prefix: str) -> int:
        """Return the number of a namespace's keys with a prefix, without looking at them."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        return self._keys.count((namespace, prefix), (namespace, end))

    def has_any(self, namespace: str) -> bool:
        """Return whether a namespace has keys."""
        return next(self.keys_from(namespace, "", ""), None) is not None

    def snapshot(self) -> SharedDictView[tuple[str, str], StoredValue]:
        """Return an immutable view of all current values."""
        return self._values.view()

    def load(self, values: Mapping[tuple[str, str], StoredValue]) -> None:
        """Fill an empty store."""
        self._values.load(values.items())
        self._bytes = sum(kv_bytes(*key, stored.value) for key, stored in values.items())
        self._keys = SortedKeys(values)

    # ---- deciding ----

    def decide_put(self, request: PutKVs, offset: int) -> tuple[KVsPut | None, KVResultsAnswer]:
        """Store values whose condition holds. `offset` is the offset of the record.

        Raises:
            LimitExceededError: the stored and existing values exceed one answer.
        """
        stored: list[KVToPut] = []
        results = []
        for item, current in self._pair_with_current(request.items):
            if _may_put(item, current):
                stored.append(item)
                results.append(_result(StoredValue(item.value, offset + 1)))
            else:
                results.append(_result(current, ErrorCode.KEY_EXIST))
        _require_answerable("items", results)
        answer = KVResultsAnswer(results=tuple(results))
        if not stored:
            return None, answer
        return _record(stored), answer

    def decide_put_all(
        self, items: Sequence[KVToPut], offset: int
    ) -> tuple[KVsPut, tuple[KVResult, ...]]:
        """Decide values that the caller stores all, if none has an error, or not at all.

        The result of an accepted value contains only its version.

        Raises:
            LimitExceededError: the conflicting values exceed one answer.
        """
        results = tuple(
            _result(current, ErrorCode.KEY_EXIST) if not _may_put(item, current) else _put(offset)
            for item, current in self._pair_with_current(items)
        )
        _require_answerable("kv_puts", results)
        return _record(items), results

    def list_earlier_puts(self, items: Sequence[KVToPut]) -> tuple[KVResult, ...]:
        """Return the version of each value that is still stored as it was put, or no result."""
        return tuple(
            KVResult(error=ErrorCode.NONE, version=current.version, found=True)
            if current is not None and current.value == item.value
            else _result(None)
            for item, current in self._pair_with_current(items)
        )

    def _pair_with_current(
        self, items: Sequence[KVToPut]
    ) -> Iterator[tuple[KVToPut, StoredValue | None]]:
        return ((item, self._values.get((item.namespace, item.key))) for item in items)

    def decide_delete(self, request: DeleteKVs) -> tuple[KVsDeleted | None, KVResultsAnswer]:
        """Delete existing keys whose condition holds.

        Raises:
            LimitExceededError: their values exceed one answer.
        """
        deleted: list[tuple[str, str]] = []
        results = []

        for item in request.keys:
            current = self._values.get((item.namespace, item.key))
            if current is None:
                results.append(_result(None, ErrorCode.KEY_NOT_EXIST))
            elif item.expected_version not in (None, current.version):
                results.append(_result(current, ErrorCode.KEY_EXIST))
            else:
                deleted.append((item.namespace, item.key))
                results.append(_result(current))

        _require_answerable("keys", results)
        answer = KVResultsAnswer(results=tuple(results))
        if not deleted:
            return None, answer

        record = KVsDeleted(
            namespaces=tuple(namespace for namespace, _ in deleted),
            keys=tuple(key for _, key in deleted),
        )
        return record, answer

    # ---- reading ----

    def get(self, request: GetKVs) -> KVResultsAnswer:
        """Return values. An absent key is not an error.

        Raises:
            LimitExceededError: they exceed one answer, and the answer may not stop.
        """
        found = (self._values.get((key.namespace, key.key)) for key in request.keys)
        results, _ = budget.take_fitting(map(_result, found), _result_bytes)
        if not request.may_stop:
            budget.require_all(len(results), len(request.keys), "keys", "set may_stop")
        return KVResultsAnswer(results=results)

    def list(self, request: ListKVs) -> ListKVsAnswer:
        """Return one page of keys or namespaces. A token is the last key of a page."""
        if request.namespaces:
            return self._list_namespaces(request)
        size, token = page_size(request.page), request.page.page_token
        after = max(request.prefix, token)
        matching = self.keys_from(request.namespace, after, request.prefix)
        # Only the token's own key was on the previous page. No key is empty.
        listed = (
            self._entry((request.namespace, key), keys_only=request.keys_only)
            for key in matching
            if key != token
        )
        entries, following = budget.page_of(listed, size, budget.entry_bytes)
        last = "" if following is None else entries[-1].key
        return ListKVsAnswer(entries=entries, next_page_token=last)

    def _list_namespaces(self, request: ListKVs) -> ListKVsAnswer:
        wanted = self._namespaces_from(max(request.prefix, request.page.page_token))
        matching = itertools.takewhile(lambda name: name.startswith(request.prefix), wanted)
        # The token is the next name: the default namespace's empty name would end the listing.
        found, following = budget.page_of(matching, page_size(request.page), budget.name_bytes)
        return ListKVsAnswer(namespace_names=found, next_page_token=following or "")

    def _entry(self, key: tuple[str, str], *, keys_only: bool) -> KVEntry:
        stored = self._values[key]
        value = b"" if keys_only else stored.value
        return KVEntry(key=key[1], value=value, version=stored.version)

    def _namespaces_from(self, name: str) -> Iterator[str]:
        """Yield the namespaces with keys, in order, from a name on."""
        while (key := next(self._keys.at_or_above((name, "")), None)) is not None:
            yield key[0]
            name = key[0] + "\0"  # the immediate successor of the name

    # ---- replaying ----

    def replay_put(self, record: KVsPut, offset: int, undo: Undo) -> None:
        """Replay `KVsPut`."""
        for namespace, key, value in zip(
            record.namespaces, record.keys, record.values, strict=True
        ):
            self._set((namespace, key), StoredValue(value, offset + 1), undo)

    def replay_deleted(self, record: KVsDeleted, undo: Undo) -> None:
        """Replay `KVsDeleted`."""
        for namespace, key in zip(record.namespaces, record.keys, strict=True):
            self._set((namespace, key), None, undo)

    def _set(self, key: tuple[str, str], value: StoredValue | None, undo: Undo) -> None:
        before = self._values.get(key)
        self._write(key, value)
        undo.append(lambda: self._write(key, before))

    def _write(self, key: tuple[str, str], value: StoredValue | None) -> None:
        before = self._values.get(key)
        if before is not None:
            self._bytes -= kv_bytes(*key, before.value)
        if value is not None:
            self._bytes += kv_bytes(*key, value.value)
        if value is None:
            self._values.pop(key)
        else:
            self._values[key] = value
        # The order of keys changes only when a key appears or disappears.
        if before is None and value is not None:
            self._keys.add(key)
        elif before is not None and value is None:
            self._keys.remove(key)


def _require_answerable(field: str, results: Sequence[KVResult]) -> None:
    fit, _ = budget.take_fitting(results, _result_bytes)
    budget.require_all(len(fit), len(results), field)


def _result_bytes(result: KVResult) -> int:
    return budget.value_bytes(result.value)


def _record(items: Sequence[KVToPut]) -> KVsPut:
    return KVsPut(
        namespaces=tuple(item.namespace for item in items),
        keys=tuple(item.key for item in items),
        values=tuple(item.value for item in items),
    )


def _put(offset: int) -> KVResult:
    """Return the result of a value stored by a record at `offset`, without the value."""
    return KVResult(error=ErrorCode.NONE, version=offset + 1, found=True)


def _may_put(item: KVToPut, current: StoredValue | None) -> bool:
    if item.expected_version is not None:
        return item.expected_version == (0 if current is None else current.version)
    # Without a condition an existing value is replaced only on request.
    return current is None or item.overwrite


def _result(stored: StoredValue | None, error: ErrorCode = ErrorCode.NONE) -> KVResult:
    if stored is None:
        return KVResult(error=error)
    return KVResult(error=error, value=stored.value, version=stored.version, found=True)
