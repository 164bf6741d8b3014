"""Spark on a cluster: a master and two workers plan what Spark on one machine and no Spark plan."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from streammeta.cli import main
from streammeta.cli.local.local_cluster import free_ports
from streammeta.reconcile.engines import spark_session
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.engines.java_runtime import find_java_home
from streammeta.reconcile.engines.spark_session import SparkConfig
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plans import plan_folder
from streammeta.storage.object_format.object_key import key_for
from tests.kit.waiting import wait_until
from tests.reconcile.fake_controller import COMMITTED, OTHER, FakeMap, LocalBucket, MapObject, own

_OPTIONS = (
    *("--conf", "spark.sql.shuffle.partitions=2"),
    *("--conf", "spark.sql.codegen.wholeStage=false"),
    *("--conf", "spark.sql.codegen.factoryMode=NO_CODEGEN"),
)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that names neither a JVM nor an interpreter, restored afterwards."""
    for name in ("SPARK_LOCAL_IP", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYTHONPATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(spark_session, "find_java_home", lambda: Path("/some/java"))
    monkeypatch.setenv("JAVA_HOME", "")


@pytest.mark.usefixtures("settings")
def test_a_driver_of_a_cluster_is_not_told_to_be_on_the_loopback_interface() -> None:
    master = "spark://elsewhere:7077"
    spark_session._prepare_environment(master)
    assert "SPARK_LOCAL_IP" not in os.environ
    assert "spark.driver.host" not in spark_session._driver_options(SparkConfig(), master)


@pytest.mark.usefixtures("settings")
def test_a_driver_that_runs_all_tasks_listens_on_the_loopback_interface_alone() -> None:
    spark_session._prepare_environment("local[2]")
    assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"
    options = spark_session._driver_options(SparkConfig(), "local[2]")
    assert options["spark.driver.bindAddress"] == "127.0.0.1"


@pytest.mark.usefixtures("settings")
def test_an_interpreter_chosen_for_executors_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "./environment/bin/python")
    spark_session._prepare_environment("yarn")
    assert os.environ["PYSPARK_PYTHON"] == "./environment/bin/python"
    assert os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable


def _spark_environment() -> dict[str, str]:
    import pyspark

    return os.environ | {
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "JAVA_HOME": str(find_java_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "256m",
        # Jobs this short end before compilers pay off.
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }


@contextmanager
def _daemon(folder: Path, name: str, *arguments: str) -> Iterator[Callable[[], str]]:
    """Run a daemon of Spark; gives a function that returns its log so far."""
    environment = _spark_environment()
    program = Path(environment["SPARK_HOME"]) / "bin" / "spark-class"
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(program), *arguments], env=environment, stdout=output, stderr=output
        )
    try:
        yield log.read_text
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def _standalone_cluster(folder: Path) -> Iterator[str]:
    """Run a master and two workers of one core; gives the master's address."""
    port, *pages = free_ports(4)
    url = f"spark://127.0.0.1:{port}"
    place = "org.apache.spark.deploy"
    common = ("--host", "127.0.0.1")
    worker = (f"{place}.worker.Worker", *common, "--cores", "1", "--memory", "1g")
    with (
        _daemon(
            folder,
            "master",
            *(f"{place}.master.Master", *common, "--port", str(port)),
            *("--webui-port", str(pages[0])),
        ) as said,
        _daemon(
            folder,
            "one",
            *worker,
            "--work-dir",
            str(folder / "one"),
            "--webui-port",
            str(pages[1]),
            url,
        ),
        _daemon(
            folder,
            "two",
            *worker,
            "--work-dir",
            str(folder / "two"),
            "--webui-port",
            str(pages[2]),
            url,
        ),
    ):
        wait_until(lambda: said().count("Registering worker") == 2, "two workers", 180)
        yield url


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark")
def test_a_plan_of_a_cluster_is_that_of_spark_on_one_machine_and_of_the_process_itself(
    bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    from pyspark.sql import SparkSession

    state.next_object_id = 2000
    state.objects = {i: MapObject(COMMITTED, size=10) for i in range(1000, 1030)}
    for object_id in range(1003, 1034):
        bucket.put(own(object_id), 10 if object_id > 1005 else 11, young=object_id == 1033)
    for key in ("zoo/other", key_for(7, OTHER), own(1040), f"{own(1041)}.bak"):
        bucket.put(key)
    local = PlanConfig(
        bucket.address, (endpoint,), tmp_path / "local", engine=EngineName.LOCAL, max_share=1
    )
    by_local = plan(local)
    running = SparkSession.getActiveSession()
    assert running is not None
    assert running.sparkContext.master == "local[2]"
    by_spark = plan(replace(local, folder=tmp_path / "spark", engine=EngineName.SPARK))
    environment = _spark_environment()
    submit = Path(environment["SPARK_HOME"]) / "bin" / "spark-submit"
    words = ["reconcile", "plan", "--store", bucket.uri, "--connect", endpoint]
    words += ["--engine", "spark", "--plan", str(tmp_path / "cluster"), "--max-share", "1"]
    with _standalone_cluster(tmp_path) as url:
        command = [
            str(submit),
            "--master",
            url,
            "--executor-memory",
            "512m",
            *_OPTIONS,
            main.__file__,
        ]
        done = subprocess.run(
            [*command, *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        executors = {path.parent.parent.name for path in tmp_path.glob("*/app-*/*")}
    print(done.stdout, done.stderr[-3000:])
    # The objects without a key are a loss, which has an exit code of its own.
    assert done.returncode == 3
    assert executors == {"one", "two"}
    by_cluster = plan_folder.read_plan_file(tmp_path / "cluster")
    assert (by_local.engine, by_spark.engine, by_cluster.engine) == ("local", "spark", "spark")
    assert by_local.classes == by_spark.classes == by_cluster.classes
    assert by_local.guards == by_spark.guards == by_cluster.guards
    assert by_local.losses == by_spark.losses == by_cluster.losses
    assert len(by_local.classes) >= 6, by_local.classes
    for name in (plan_folder.VERDICTS, plan_folder.CANDIDATES):
        of_local, of_spark, of_cluster = (
            sorted(pq.read_table(tmp_path / made / name).to_pylist(), key=lambda row: row["key"])
            for made in ("local", "spark", "cluster")
        )
        assert of_local == of_spark == of_cluster
        assert of_local
