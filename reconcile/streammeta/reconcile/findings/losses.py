"""Losses: confirmation and description of committed objects with unreadable records.

A listing may be wrong, and the metadata changes during the comparison. Each object is therefore
looked up in the bucket again, before a second copy of the metadata. An object that was absent or
damaged and is still in that copy is lost. Losses are reported as ranges of streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from streammeta.controller.snapshot.checkpoint_file import CheckpointReader
from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.metadata.export import copy_of_metadata
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.vocabulary import tables
from streammeta.reconcile.vocabulary.verdicts import ABSENT, LOST, WANTED_STATES, Verdict
from streammeta.storage.errors import ObjectNotFoundError
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import common_pb2

MOST_CONFIRMED = 100_000
"""Maximum number of objects to look up again, in the order of the plan's tables."""

_HEADS_AT_ONCE = 8
_FIRST_SHOWN = 20
_COPY = "second.checkpoint"


@dataclass(frozen=True, slots=True)
class _Suspect:
    key: str
    object_id: int
    verdict: Verdict
    map_size: int


def confirm_losses(store: ObjectStore, leader: LeaderClient, draft: Path) -> plan_folder.LossCounts:
    """Look up a draft's missing and damaged objects again, and write the losses.

    Raises:
        StorageError: the bucket does not answer.
        ControllerError: no leader sent a second copy of the metadata.
        MetadataExportError: the second copy can't be read.
    """
    suspects = list(islice(_suspects(draft / plan_folder.VERDICTS), MOST_CONFIRMED))
    with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
        is_lost = list(pool.map(lambda suspect: _is_still_lost(store, suspect), suspects))
    lost = [suspect for suspect, still in zip(suspects, is_lost, strict=True) if still]
    rows = tables.arrow_schema(tables.LOSS_COLUMNS).empty_table()
    if lost:
        with copy_of_metadata(leader, draft / _COPY) as checkpoint:
            rows = _described(lost, checkpoint)
    folder = draft / plan_folder.LOSSES
    folder.mkdir()
    pq.write_table(rows, folder / "part-00000.parquet")
    return _counted(rows, len(suspects))


def _suspects(verdicts: Path) -> Iterator[_Suspect]:
    wanted = pa.array([str(verdict) for verdict in LOST])
    columns = "key string, object_id long, verdict string, map_size long"
    for rows in tables.read_batches(verdicts, columns):
        found = rows.filter(pc.is_in(rows["verdict"], wanted))
        for row in found.to_pylist():
            yield _Suspect(row["key"], row["object_id"], Verdict(row["verdict"]), row["map_size"])


def _is_still_lost(store: ObjectStore, suspect: _Suspect) -> bool:
    try:
        info = store.head(suspect.key)
    except ObjectNotFoundError:
        return True
    if suspect.verdict is Verdict.SIZE_MISMATCH:
        return info.size != suspect.map_size
    return suspect.verdict is not Verdict.MISSING  # other damage was found by two reads


def _described(lost: Sequence[_Suspect], checkpoint: CheckpointReader) -> pa.Table:
    """Return the ranges of the objects still in the metadata, by stream and offset."""
    found = pa.table(
        {
            "object_id": pa.array([suspect.object_id for suspect in lost], pa.int64()),
            "key": [suspect.key for suspect in lost],
            "verdict": [str(suspect.verdict) for suspect in lost],
        }
    )
    objects = _with_holder(_of(checkpoint.table("objects"), "object_id", found["object_id"]))
    wanted = objects.filter(pc.is_in(objects["state"], pa.array(WANTED_STATES, pa.int64())))
    facts = _of(checkpoint.table("object_facts"), "object_id", found["object_id"])
    ranges = _of(checkpoint.table("object_ranges"), "object_id", wanted["holder"])
    facts = _with_known_times(facts)
    joined = found.join(wanted, "object_id", join_type="inner")
    joined = joined.join(facts, "object_id", join_type="left outer")
    joined = joined.join(ranges, "holder", "object_id", join_type="left outer")
    order = [(name, "ascending") for name in ("stream_id", "start_offset", "object_id")]

    return (
        joined.select(tables.arrow_schema(tables.LOSS_COLUMNS).names)
        .sort_by(order)
        .cast(tables.arrow_schema(tables.LOSS_COLUMNS))
    )


def _with_holder(objects: pa.Table) -> pa.Table:
    """Return the columns of losses, with the object that has the ranges as `holder`.

    A linked object has no ranges. The ranges of its composite are lost, at least in part.
    """
    is_linked = pc.equal(objects["state"], common_pb2.OBJECT_STATE_LINKED)
    holder = pc.if_else(is_linked, objects["order_id"], objects["object_id"])
    return pa.table(
        {
            "object_id": objects["object_id"],
            "state": objects["state"].cast(pa.int64()),
            "holder": holder,
            "committed_ms": objects["timestamp_ms"],
            "map_size": objects["object_size"],
            "map_node": objects["node_id"].cast(pa.int64()),
        }
    )


def _with_known_times(facts: pa.Table) -> pa.Table:
    names = ("min_timestamp_ms", "max_timestamp_ms")
    known = {name: pc.if_else(pc.equal(facts[name], ABSENT), None, facts[name]) for name in names}
    return pa.table({"object_id": facts["object_id"]} | known)


def _of(table: pa.Table, column: str, ids: pa.ChunkedArray) -> pa.Table:
    return table.filter(pc.is_in(table[column], ids.combine_chunks()))


def _counted(rows: pa.Table, looked_up: int) -> plan_folder.LossCounts:
    sizes = rows.group_by("object_id").aggregate([("map_size", "max")])
    ranges = rows.filter(rows["stream_id"].is_valid())
    shown = rows.select(list(plan_folder.LostRange.__dataclass_fields__)).slice(0, _FIRST_SHOWN)
    first: list[dict[str, Any]] = shown.to_pylist()
    return plan_folder.LossCounts(
        objects=sizes.num_rows,
        size=pc.sum(sizes["map_size_max"]).as_py() or 0,
        streams=pc.count_distinct(ranges["stream_id"]).as_py(),
        ranges=ranges.num_rows,
        refuted=looked_up - sizes.num_rows,
        first=tuple(plan_folder.LostRange(**row) for row in first),
    )
