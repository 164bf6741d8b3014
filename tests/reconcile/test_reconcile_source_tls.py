"""The map as a table for Spark, of a real cluster that is spoken to over mutual TLS alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.reconcile.vocabulary.errors import ConfigurationError
from streammeta.tls.files import TlsFiles
from tests.kit.certificates import Authority
from tests.kit.real_cluster import STEADY, put

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[str]:
    """Three controllers over TLS with 20 keys in their map; gives their addresses."""
    with _over_tls(tmp_path_factory.mktemp("cluster"), authority) as running:
        with ControllerClient(running.endpoints, tls=authority.issue("admin/alice")) as client:
            for number in range(20):
                put(client, f"key-{number}", f"value {number}")
        yield running.connect


@contextmanager
def _over_tls(root: Path, authority: Authority) -> Iterator[LocalCluster]:
    bucket = root / "bucket"
    bucket.mkdir()
    tls = {node_id: authority.issue(f"controller/{node_id}") for node_id in (1, 2, 3)}
    cluster = LocalCluster(root, "test", f"file://{bucket}", free_ports(3), STEADY, tls=tls)
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop_all()


@pytest.fixture
def session(spark: None) -> SparkSession:
    from pyspark.sql import SparkSession

    from streammeta.reconcile.metadata.source import MetadataSource

    running = SparkSession.getActiveSession()
    assert running is not None
    running.dataSource.register(MetadataSource)
    return running


def options(files: TlsFiles) -> dict[str, str]:
    return {"tlsCa": str(files.ca), "tlsCert": str(files.certificate), "tlsKey": str(files.key)}


def read(session: SparkSession, connect: str, copies: Path, **more: str) -> DataFrame:
    given = {"connect": connect, "copies": str(copies), "table": "kvs", "wait": "10"} | more
    return session.read.format("streammeta").options(**given).load()


def test_a_reconciler_reads_a_table_and_executors_need_no_certificate(
    session: SparkSession, cluster: str, authority: Authority, tmp_path: Path
) -> None:
    issued = authority.issue("reconciler/spark", serial=1)
    table = read(session, cluster, tmp_path / "copies", **options(issued))
    for path in (issued.certificate, issued.key):
        path.unlink()
    keys = {row["key"]: bytes(row["value"]).decode() for row in table.collect()}
    expected = {f"key-{number}": f"value {number}" for number in range(20)}
    assert {key: keys.get(key) for key in expected} == expected
    assert len(list((tmp_path / "copies").iterdir())) == 1


def test_who_may_not_read_the_map_learns_the_role_that_may(
    session: SparkSession, cluster: str, authority: Authority, tmp_path: Path
) -> None:
    from pyspark.errors import PySparkException

    as_monitor = options(authority.issue("monitor/page"))
    with pytest.raises(PySparkException, match=r"ControllerError: .*reconciler.*tlsCert"):
        read(session, cluster, tmp_path / "copies", **as_monitor)
    assert list((tmp_path / "copies").iterdir()) == []


def test_a_caller_needs_tls_options(session: SparkSession, cluster: str, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match="tlsCa"):
        read(session, cluster, tmp_path / "copies", wait="1")


def test_unusable_files_are_refused_by_their_option(authority: Authority, tmp_path: Path) -> None:
    from streammeta.reconcile.metadata.source import MetadataSource

    files = authority.issue("reconciler/spark", serial=2)
    given = {"connect": "127.0.0.1:1", "copies": str(tmp_path), "table": "kvs"} | options(files)
    for name in ("tlsCa", "tlsCert", "tlsKey"):
        without = {key: value for key, value in given.items() if key != name}
        with pytest.raises(ConfigurationError, match=f"'{name}'"):
            MetadataSource(without)
        with pytest.raises(ConfigurationError, match=f"{name}"):
            MetadataSource(given | {name: str(tmp_path / "gone")}).schema()
    other = options(authority.issue("reconciler/spark", serial=3))
    with pytest.raises(ConfigurationError, match=r"tlsCert.*tlsKey"):
        MetadataSource(given | {"tlsKey": other["tlsKey"]}).schema()
