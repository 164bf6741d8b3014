"""Lookup of keys in the current bucket, by pages of a listing where that is cheaper.

A page describes a thousand keys for the price of a few HEAD requests. Keys close together are found
by listing from the first of them on. If too many other keys lie between them, the caller uses HEAD
requests for the rest.
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
    """Describe the ascending `keys` in the bucket, as far as a listing is cheaper.

    Returns the found objects by key, and the number of leading `keys` that are settled: found or
    known to be absent. The listing continues up to `page` keys, and 100 more for each settled key.
    """
    found: dict[str, ObjectInfo] = {}
    settled = 0
    if not keys:
        return found, settled
    # The longest prefix of the first key sorts before it and leaves little in between.
    listed = store.list_objects(start_after=keys[0][:-1])
    for passed, info in enumerate(listed):
        while settled < len(keys) and keys[settled] < info.key:
            settled += 1
        if settled < len(keys) and keys[settled] == info.key:
            found[info.key] = info
            settled += 1
        # Too many other keys lie between. The caller asks for the rest one by one.
        if settled == len(keys) or passed >= page + _OTHERS_A_KEY * settled:
            return found, settled
    return found, len(keys)
