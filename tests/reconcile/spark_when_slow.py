"""Tests of what both engines share: one engine shows it, and `--slow` adds Spark."""

import pytest

from streammeta.reconcile.engines.engine import EngineName

spark_when_slow = pytest.mark.parametrize(
    "engine",
    [
        EngineName.LOCAL,
        pytest.param(EngineName.SPARK, marks=[pytest.mark.spark, pytest.mark.slow]),
    ],
    indirect=True,
)
