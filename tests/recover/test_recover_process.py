"""A majority is lost with real controllers: one goes on, voters are added, old disks stop."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.local.local_cluster import PROGRAM, LocalCluster
from streammeta.controller.journal.directory import META_NAME
from streammeta.storage.cluster_files.bucket_marker import read_generations
from streammeta.storage.object_store.opening import open_object_store
from tests.backup.test_adoption_process import KEPT, read_back, restore, run, written
from tests.backup.test_restore_process import Restoring, is_copied, options
from tests.kit.real_cluster import (
    FAST,
    describe,
    leader_of,
    put,
    replica,
    running_cluster,
    streammeta,
    values,
    wait_superseded,
)
from tests.kit.waiting import wait_until
from tests.recover.recovering import DEAD, SURVIVOR, Recovering

pytestmark = pytest.mark.process


def filled(cluster: LocalCluster) -> dict[str, str]:
    """Write some keys, which the survivor gets too; return them."""
    with ControllerClient(cluster.endpoints) as client:
        for number in range(20):
            put(client, f"key {number}", str(number))
        wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")
        wait_until(lambda: replica(cluster, SURVIVOR).get("lag") == 0, "the survivor to have all")
        return values(client)


def has_three_voters(cluster: LocalCluster) -> bool:
    return sum(controller.voter for controller in describe(cluster).controllers) == 3


def error_of(answer: dict[str, object]) -> str:
    error = answer["error"]
    assert isinstance(error, dict)
    assert answer["exit_code"] == 1
    return str(error["code"])


def test_a_majority_is_lost_and_the_cluster_goes_on(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        wanted = filled(cluster)
        uuid_before = describe(cluster).cluster_uuid
        recovering = Recovering(cluster)
        assert error_of(recovering.inspect()) == "IN_USE"
        recovering.lose(*DEAD)
        cluster.children[SURVIVOR].kill()

        recovering.inspect()
        assert error_of(recovering.plan(dead="1")) == "DEAD_LIST"
        planned = recovering.plan()
        assert planned["exit_code"] == 0, planned
        assert planned["survivors"][0]["goes_on"]
        assert error_of(recovering.plan()) == "EXISTS"
        dry = recovering.apply()
        assert (dry["exit_code"], dry["done"]) == (0, False)
        assert not read_generations(open_object_store(cluster.store_uri), planned["namespace"])
        applied = recovering.apply("--yes", "--audit-log", str(recovering.audit_log))
        assert applied["done"], applied
        again = recovering.apply("--yes")
        assert again == applied, "a repeat changes nothing"
        verified = streammeta("audit", "verify", str(recovering.audit_log))
        assert verified["exit_code"] == 0, verified

        cluster.start(SURVIVOR)
        leader_of(cluster)
        with ControllerClient(cluster.endpoints) as client:
            assert values(client) == wanted
            recovering.finish()
            put(client, "after", "1")
            wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")
            assert describe(cluster).cluster_uuid == planned["cluster_uuid"] != uuid_before
            for node_id in DEAD:
                recovering.add_voter(node_id)
            wait_until(lambda: has_three_voters(cluster), "three voters")
            cluster.children[SURVIVOR].kill()  # the new voters do without it
            leader_of(cluster)
            put(client, "later", "1")
            assert values(client) == {**wanted, "after": "1", "later": "1"}


def test_a_disk_of_before_that_returns_stops_and_is_left_as_it_was(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        filled(cluster)
        recovering = Recovering(cluster)
        recovering.lose(*DEAD)
        cluster.children[SURVIVOR].kill()
        planned = recovering.recovered()
        cluster.start(SURVIVOR)
        leader_of(cluster)
        shutil.copytree(recovering.lost(1), cluster.data_dir(1))
        cluster.spawn(1)
        assert "is older than that" in recovering.end_of(1)
        assert recovering.inspect(1)["end_offset"] < planned["end_offset"]
        assert leader_of(cluster) == SURVIVOR
        # Recovered by mistake as well, it finds the bucket taken.
        late = streammeta(
            *("recover", "plan", "--report", str(recovering.report(1)), "--dead", "2,3"),
            *(*recovering.store, "--plan", str(tmp_path / "late.json")),
        )
        assert error_of(late) == "WRONG_BUCKET"


def test_a_majority_that_comes_back_after_all_is_superseded(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        filled(cluster)
        recovering = Recovering(cluster)
        recovering.lose(*DEAD)
        cluster.children[SURVIVOR].kill()
        recovering.recovered()
        for node_id in DEAD:
            shutil.move(recovering.lost(node_id), cluster.data_dir(node_id))
            cluster.spawn(node_id)
        leader_of(cluster)  # one of the old majority: the survivor is out of its reach
        with ControllerClient(cluster.endpoints) as client:
            wait_superseded(client)
        cluster.start(SURVIVOR)
        for node_id in DEAD:
            assert "is older than that" in recovering.end_of(node_id)
        wait_until(lambda: leader_of(cluster) == SURVIVOR, "the survivor to lead")


def test_killed_at_any_time_it_is_repeated(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        wanted = filled(cluster)
        recovering = Recovering(cluster)
        recovering.lose(*DEAD)
        cluster.children[SURVIVOR].kill()
        recovering.inspect()
        recovering.plan()
        directory, whole = cluster.data_dir(SURVIVOR), tmp_path / "whole"
        shutil.copytree(directory, whole)
        for step in range(8):
            shutil.rmtree(directory)
            shutil.copytree(whole, directory)
            _killed_when_there(recovering, step)
            if not (directory / META_NAME).exists():
                checked = streammeta("storage", "info", "--data-dir", str(directory))
                assert "recover apply" in checked["error"]["message"], checked
            repeated = recovering.apply("--yes")
            assert repeated["exit_code"] == 0, repeated
        cluster.start(SURVIVOR)
        leader_of(cluster)
        with ControllerClient(cluster.endpoints) as client:
            assert values(client) == wanted


def _killed_when_there(recovering: Recovering, step: int) -> None:
    """Begin to apply; kill it as soon as some file of the exchange is there, or a little later."""
    child = subprocess.Popen(
        [*PROGRAM, *recovering.apply_words("--yes")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    directory = recovering.cluster.data_dir(SURVIVOR)
    staged = directory / "recovery-2" / "after"
    awaited = (
        directory / "recovery-2.json",
        staged,
        staged / "quorum-state",
        staged / META_NAME,
        directory / "recovery-2" / "before",
        directory / "recovery-2" / "before" / META_NAME,
        directory / "recovery-2" / "before" / "quorum-state",
        directory / "recovery-2" / "before" / "flushed-mark",
    )[step]
    while child.poll() is None and not awaited.exists():
        time.sleep(0)
    child.send_signal(signal.SIGKILL)
    assert child.wait() in (0, -signal.SIGKILL)


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
