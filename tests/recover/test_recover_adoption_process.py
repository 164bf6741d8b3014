"""A majority is lost with real controllers and brokers: backup, survivor and bucket compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backup.test_adoption_process import KEPT, read_back, restore, run, written
from tests.backup.test_restore_process import Restoring, is_copied, options
from tests.kit.real_cluster import FAST, describe, leader_of, replica, running_cluster
from tests.kit.waiting import wait_until
from tests.recover.recovering import DEAD, SURVIVOR, Recovering

pytestmark = pytest.mark.process


@pytest.mark.parametrize("is_further", [False, True], ids=["equal", "further"])
def test_survivors_are_compared_with_a_real_backup(tmp_path: Path, is_further: bool) -> None:
    with running_cluster(tmp_path, options=(*options(tmp_path), *KEPT)) as cluster:
        wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")
        wanted = run(written(cluster, 1007, [], "before"))
        wait_until(lambda: replica(cluster, SURVIVOR).get("lag") == 0, "the survivor to have all")
        if is_further:
            cluster.children[SURVIVOR].kill()
            leader_of(cluster)
            for stream_id, payloads in run(written(cluster, 1007, [*wanted], "after")).items():
                wanted[stream_id] += payloads
        wait_until(lambda: is_copied(cluster, tmp_path), "all to be copied")
        recovering = Recovering(cluster)
        recovering.lose(*DEAD)
        if not is_further:
            cluster.children[SURVIVOR].kill()
        inspected = recovering.inspect()
        assert inspected["exit_code"] == 0, inspected
        planned = recovering.plan("--from", f"file://{tmp_path}/backups")
        if not is_further:
            assert planned["exit_code"] == 0, planned
            # A leader may have claimed object ids once more after all was copied.
            assert inspected["end_offset"] - planned["backup_end_offset"] in (0, 1)
            assert planned["backup_epoch"] == inspected["last_epoch"]
            return
        assert (planned["exit_code"], planned["error"]["code"]) == (1, "BACKUP_IS_FURTHER")
        assert not recovering.plan_file.exists()

    restoring = Restoring(tmp_path, "second", 1)
    assert restoring.make_plan()["exit_code"] == 0, "what the hint says"
    restoring.applied()
    try:
        restoring.cluster.start_all()
        leader_of(restoring.cluster)
        assert run(read_back(restoring.cluster, sorted(wanted))) == wanted
    finally:
        restoring.cluster.stop_all()


def test_what_the_survivor_lacks_is_adopted_from_the_bucket(tmp_path: Path) -> None:
    with running_cluster(tmp_path, options=(*FAST, *KEPT)) as cluster:
        wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")
        wanted = run(written(cluster, 1007, [], "before"))
        ids = sorted(wanted)
        wait_until(lambda: replica(cluster, SURVIVOR).get("lag") == 0, "the survivor to have all")
        cluster.children[SURVIVOR].kill()
        leader_of(cluster)
        # The same broker goes on, then another one, under larger epochs.
        for node_id, text in ((1007, "after"), (1008, "after that")):
            for stream_id, payloads in run(written(cluster, node_id, ids, text)).items():
                wanted[stream_id] += payloads
        recovering = Recovering(cluster)
        recovering.lose(*DEAD)
        recovering.recovered()
        cluster.start(SURVIVOR)
        leader_of(cluster)
        wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")
        planned = restore("adopt", "--dry-run", cluster=cluster)
        assert planned["exit_code"] == 0, planned
        assert (planned["missing"], planned["lost"]) == ([], [])
        done = restore("adopt", "--yes", cluster=cluster)
        assert done["exit_code"] == 0, done
        assert done["adopted"] == planned["adoptable"] > 0
        finished = restore("finish", cluster=cluster)
        assert finished["exit_code"] == 0, finished
        assert run(read_back(cluster, ids)) == wanted
        for stream_id, payloads in run(written(cluster, 1008, ids, "again")).items():
            wanted[stream_id] += payloads
        assert run(read_back(cluster, ids)) == wanted
