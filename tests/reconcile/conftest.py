"""Fixtures of reconciliation tests: engines, one Spark session, a bucket, a fake controller."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.engines.spark_session import SparkConfig, spark_session
from streammeta.reconcile.plan import PlanConfig, plan
from tests.reconcile.fake_controller import FakeMap, LocalBucket, Scene, serving

_FOR_SHORT_JOBS = """\
spark.sql.codegen.wholeStage   false
spark.sql.codegen.factoryMode  NO_CODEGEN
spark.sql.adaptive.enabled     false
"""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep a session running, which plan and apply then use."""
    # Jobs this short end before compilers pay off, the JVM's or Spark's own.
    os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    defaults = tmp_path_factory.mktemp("spark") / "spark-defaults.conf"
    defaults.write_text(_FOR_SHORT_JOBS)
    os.environ.setdefault("SPARK_CONF_DIR", str(defaults.parent))
    with spark_session(SparkConfig(shuffle_partitions=2)):
        yield


@pytest.fixture(params=[EngineName.LOCAL, pytest.param(EngineName.SPARK, marks=pytest.mark.spark)])
def engine(request: pytest.FixtureRequest) -> EngineName:
    """Each of the engines; what uses it holds for both."""
    if request.param is EngineName.SPARK:
        request.getfixturevalue("spark")
    return EngineName(request.param)


@pytest.fixture
def state() -> FakeMap:
    return FakeMap()


@pytest.fixture
def bucket(state: FakeMap, tmp_path: Path) -> LocalBucket:
    """An empty bucket of the cluster."""
    made = LocalBucket(tmp_path / "bucket")
    state.mark(made.store)
    return made


@pytest.fixture
def endpoint(state: FakeMap) -> Iterator[str]:
    with serving(state) as where:
        yield where


@pytest.fixture
def scene(state: FakeMap, bucket: LocalBucket, endpoint: str, tmp_path: Path) -> Scene:
    return Scene(state, bucket, endpoint, tmp_path)


@pytest.fixture
def make_plan(
    bucket: LocalBucket, endpoint: str, tmp_path: Path, engine: EngineName
) -> Callable[..., Any]:
    """Plans with an engine, by the name of a folder; gives the folder and what was found."""

    def make(name: str, **settings: Any) -> Any:
        folder = tmp_path / name
        config = PlanConfig(
            bucket.address, (endpoint,), folder, engine=engine, max_share=1, **settings
        )
        return config.folder, plan(config)

    return make
