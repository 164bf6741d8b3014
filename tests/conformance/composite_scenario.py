"""Composites, deleted together with what they link, as their bytes say.

The map knows what a composite links and the lifecycle goes by it, so bytes are not read for that;
here they are, since it is they that the scenario is about.
"""

from __future__ import annotations

from typing import Any

from streammeta.storage.object_format.composite import (
    LinkedObject,
    decode_composite,
    encode_composite,
)
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.object_key import key_for
from tests.conformance.conformance_report import ScenarioResult
from tests.conformance.scenario_args import Args

NAMESPACE = "scenario"
BLOCK_SIZE = 53


def delete_composites(given: Args, result: ScenarioResult) -> dict[str, Any]:
    """Build the composites, delete them and their links; return what was deleted."""
    composites, linked = given.take("composites"), given.take("linked_per_composite")
    bucket = given.take("bucket", 0)
    stored: dict[str, bytes] = {}
    for number in range(composites):
        first = number * (linked + 1)
        ids = range(first, first + linked)
        stored |= {key_for(object_id, NAMESPACE): b"" for object_id in ids}
        links = [
            LinkedObject(object_id, bucket, (IndexEntry(1, at, at + 1, 1, 0, BLOCK_SIZE),))
            for at, object_id in enumerate(ids)
        ]
        stored[key_for(first + linked, NAMESPACE)] = encode_composite(links)
    deleted: list[int] = []
    for number in range(composites):
        composite_id = number * (linked + 1) + linked
        key = key_for(composite_id, NAMESPACE)
        composite = decode_composite(stored[key], source=key)
        for object_id in (*(link.object_id for link in composite.links), composite_id):
            del stored[key_for(object_id, NAMESPACE)]
            deleted.append(object_id)
    result.deviate(0, "composites", "links-in-the-map")
    return {
        "all_object_keys_deleted": not stored,
        "deleted_object_ids": [min(deleted), max(deleted)],
        "deleted_object_count": len(deleted),
    }
