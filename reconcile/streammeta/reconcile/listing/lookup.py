"""Lookup of keys in the bucket as it is now, by the pages of a listing where that costs less.

A page describes a thousand keys for the price of a few HEAD requests. So keys that lie close
together are found by listing the bucket from the first of them on; when too many others lie between
them, the rest is left to HEAD requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from streammeta.storage.object_store.protocol.base import ObjectInfo, ObjectStore

_PAGE = 1000
_OTHERS_A_KEY = 100
"""Keys that can be listed in half the time of one HEAD request."""


def find_by_listing(
    store: ObjectStore, keys: Sequence[str], page: int = _PAGE
) -> tuple[dict[str, ObjectInfo], int]:
    """Describe those of the ascending `keys` that are in the bucket, as far as a listing pays.

    Returns the objects found, by key, and how many of `keys`, from the first on, are settled: found
    or known to be absent. The listing goes on as long as it has passed at most `page` keys, and 100
    more for each one settled.
    """
    found: dict[str, ObjectInfo] = {}
    settled = 0
    if not keys:
        return found, settled
    listed = store.list_objects(start_after=keys[0][:-1])
    for passed, info in enumerate(listed):
        while settled < len(keys) and keys[settled] < info.key:
            settled += 1
        if settled < len(keys) and keys[settled] == info.key:
            found[info.key] = info
            settled += 1
        if settled == len(keys) or passed >= page + _OTHERS_A_KEY * settled:
            return found, settled
    return found, len(keys)
