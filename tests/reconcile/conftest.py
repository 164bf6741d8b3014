"""One Spark session for all reconciliation tests: it takes longer to start than they to run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from streammeta.reconcile.session import SparkConfig, spark_session


@pytest.fixture(scope="session")
def spark() -> Iterator[None]:
    """Keep a session running, which plan and apply then use."""
    # Jobs this short end before the JVM's optimizing compiler pays off.
    os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    with spark_session(SparkConfig(shuffle_partitions=2)):
        yield
