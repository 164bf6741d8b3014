"""A majority is lost with real controllers: one goes on, voters are added, old disks stop."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.local.local_cluster import PROGRAM, LocalCluster
from streammeta.controller.journal.directory import META_NAME
from streammeta.storage.cluster_files.bucket_marker import read_generations
from streammeta.storage.object_store.opening import open_object_store
from tests.kit.real_cluster import (
    describe,
    leader_of,
    put,
    replica,
    running_cluster,
    streammeta,
    values,
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
    return sum(one.voter for one in describe(cluster).controllers) == 3


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

            def is_fenced() -> bool:
                try:
                    put(client, "from before", "1")
                except CallError as error:
                    return error.code == "SUPERSEDED"
                return False

            wait_until(is_fenced, "the old majority to notice")
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
