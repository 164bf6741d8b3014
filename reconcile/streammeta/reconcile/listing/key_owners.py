"""Owners of keys: the cluster itself, another cluster, or neither.

Nearly all keys of a bucket belong to objects of the cluster with ids below 2^32. These are parsed
as columns, and the others one by one.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streammeta.reconcile.cluster.lease import is_lease_key
from streammeta.reconcile.vocabulary import quarantine, verdicts
from streammeta.storage.cluster_files.bucket_marker import is_own_key
from streammeta.storage.object_format import object_key
from streammeta.storage.object_log.slot import parse_log_key

_NAMESPACE_PREFIX = object_key.cluster_namespace("x")[:-1]
_PREFIX_DIGITS = 8
_SPELLING = "^([0-9a-f]{8})/%s/(0|[1-9][0-9]{0,9})$"
_PREFIX = re.compile("[0-9a-f]{8}")


def owner_of(key: str, namespace: str) -> tuple[verdicts.Owner, int | None, str]:
    """Return the owner of `key`, its object id, and a note for the report."""
    # Special keys first. The strict parser of object keys would call them foreign.
    if is_own_key(key, namespace) or is_lease_key(key, namespace):
        return verdicts.Owner.MARKER, None, ""
    if parse_log_key(key, namespace) is not None:
        return verdicts.Owner.LOG, None, ""
    if quarantine.is_quarantined(key, namespace):
        return verdicts.Owner.QUARANTINED, None, ""

    other = key.partition("/")[0]
    if other.startswith(_NAMESPACE_PREFIX) and other != namespace:
        return verdicts.Owner.OTHER_CLUSTER, None, other

    match object_key.parse_key(key, namespace):
        case object_key.OwnKey(object_id):
            return verdicts.Owner.OWN, object_id, ""
        case object_key.OtherClusterKey(object_id, other):
            return verdicts.Owner.OTHER_CLUSTER, object_id, other
        case object_key.ForeignKey(reason):
            return verdicts.Owner.FOREIGN, None, reason


def owner_columns(keys: Any, namespace: str) -> tuple[Any, Any, Any]:
    """Return owners, object ids and notes of an array of keys, as columns of a listing."""
    owners = np.full(len(keys), int(verdicts.Owner.OWN), dtype=np.int64)
    ids, is_own = _own_ids(keys, namespace)
    rest = np.flatnonzero(~is_own)
    found = [owner_of(key, namespace) for key in keys.take(pa.array(rest)).to_pylist()]
    owners[rest] = [int(owner) for owner, _, _ in found]
    # Masked below, because a column of numbers has no None.
    ids[rest] = [object_id or 0 for _, object_id, _ in found]
    is_unnamed = np.zeros(len(keys), dtype=np.bool_)
    is_unnamed[rest] = [object_id is None for _, object_id, _ in found]
    notes = pa.array(np.full(len(keys), "", dtype=object), pa.string())
    if len(rest):
        said = pa.array([note for _, _, note in found], pa.string())
        notes = pc.replace_with_mask(notes, pa.array(~is_own), said)
    return pa.array(owners), pa.array(ids, mask=is_unnamed), notes


def _own_ids(keys: Any, namespace: str) -> tuple[verdicts.Int64Column, Any]:
    """Return the ids of keys that certainly belong to this cluster, and a mask of these."""
    ids = np.zeros(len(keys), dtype=np.int64)
    is_own = np.zeros(len(keys), dtype=np.bool_)
    if _PREFIX.fullmatch(namespace):
        return ids, is_own  # its marker keys look like the prefix of an object's key

    matched = pc.match_substring_regex(keys, _SPELLING % re.escape(namespace))
    at = np.flatnonzero(matched.to_numpy(zero_copy_only=False))
    if not len(at):
        return ids, is_own

    spelled = keys.take(pa.array(at))
    start = _PREFIX_DIGITS + len(namespace) + 2
    # At most ten digits by the pattern, so the cast can't overflow.
    decimals = pc.utf8_slice_codeunits(spelled, start).cast(pa.int64()).to_numpy()
    prefixes = pc.utf8_slice_codeunits(spelled, 0, _PREFIX_DIGITS)
    # The pattern checks only the spelling. Both spellings of the id have to agree.
    sure = decimals == _reversed_hex(prefixes)
    ids[at[sure]] = decimals[sure]
    is_own[at[sure]] = True

    return ids, is_own


def _reversed_hex(prefixes: Any) -> verdicts.Int64Column:
    """Return the numbers with these hex digits, lowest digit first."""
    joined = "".join(prefixes.to_pylist()).encode()
    codes = np.frombuffer(joined, dtype=np.uint8).reshape(-1, _PREFIX_DIGITS).astype(np.int64)
    digits = np.where(codes >= ord("a"), codes - ord("a") + 10, codes - ord("0"))
    weights: verdicts.Int64Column = np.int64(1) << (4 * np.arange(_PREFIX_DIGITS, dtype=np.int64))
    total: verdicts.Int64Column = digits @ weights
    return total
