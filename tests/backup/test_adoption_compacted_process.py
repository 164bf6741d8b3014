"""A restore to a point since when everything was compacted, and the compacted objects deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from streammeta.client import StreamClient
from streammeta.storage.adoption.survey import list_stored
from streammeta.storage.object_store.opening import open_object_store
from tests.backup.test_adoption_process import read_back, restore, run
from tests.backup.test_restore_process import NAMESPACE, Restoring, is_copied, options
from tests.kit.real_cluster import describe, leader_of, running_cluster, streammeta
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.process

ROUNDS = 3


def test_compacted_records_are_read_after_a_restore_to_a_point_before_they_were(
    tmp_path: Path,
) -> None:
    soon = ("--delete-delay-ms", "0")
    with running_cluster(tmp_path, 1, options=(*options(tmp_path), *soon)) as old:
        wait_until(lambda: not describe(old).bucket_problem, "ids to be issued")
        store = open_object_store(old.store_uri)

        def stored() -> set[int]:
            return {found.object_id for found in list_stored(store, NAMESPACE)}

        async def write(streams: StreamClient, ids: list[int], text: str) -> list[bytes]:
            payloads = [f"{text} {number}".encode() for number in range(4)]
            for payload in payloads:
                for stream_id in ids:
                    await streams.append(stream_id, payload)
                await streams.flush()
            return payloads

        async def live() -> tuple[int, set[int], dict[int, list[bytes]]]:
            """Write, note a point and its objects, then write and compact until all have gone."""
            async with await StreamClient.open(
                old.endpoints, old.store_uri, node_id=1007
            ) as streams:
                ids = list(await streams.create_streams([{"topic": "t"}] * 3))
                (await streams.open_streams(ids)).require_all()
                payloads = await write(streams, ids, "before")
                before, point = stored(), describe(old).high_watermark
                for number in range(ROUNDS):
                    payloads += await write(streams, ids, f"after {number}")
                    await streams.compact()
                payloads += await write(streams, ids, "last")
                await streams.close_streams(ids)
            return point, before, dict.fromkeys(ids, payloads)

        point, before, wanted = run(live())
        wait_until(lambda: is_copied(old, tmp_path), "all to be copied")
        wait_until(lambda: not before & stored(), "the objects of the point to be deleted")

    restoring = Restoring(tmp_path, "second", 1)
    planned = restoring.make_plan("--to-offset", str(point))
    assert planned["exit_code"] == 0, planned
    assert planned["missing_objects"] == len({row["object_id"] for row in planned["missing"]})
    assert planned["missing_objects"] > 0
    restoring.applied()
    cluster = restoring.cluster
    try:
        cluster.start_all()
        leader_of(cluster)
        wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")
        done = restore("adopt", "--yes", cluster=cluster)
        assert done["exit_code"] == 0, done
        assert (done["lost"], done["missing"]) == ([], [])
        assert done["replaced"] == planned["missing_objects"]
        again = restore("adopt", "--yes", cluster=cluster)
        assert (again["adopted"], again["missing"], again["lost"]) == (0, [], [])
        assert restore("finish", cluster=cluster)["exit_code"] == 0
        assert run(read_back(cluster, sorted(wanted))) == wanted
        agreed = streammeta("cluster", "hash", "--connect", cluster.connect)
        assert agreed["exit_code"] == 0, agreed
    finally:
        cluster.stop_all()
