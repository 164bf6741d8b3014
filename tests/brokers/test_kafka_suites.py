"""Suites that the authors of Kafka clients run against brokers, against this product's broker.

`./scripts/test --kafka-suites` fetches and runs them. Tests that fail are listed with the reason in
docs/kafka.md, and no others may fail.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.kit.kafka_brokers import running_brokers

_ROOT = Path(__file__).parents[2]
_SUITES = _ROOT / ".tools" / "kafka-suites"
_HEADING = "## Suites of other clients"
_LIMIT_S = 3600
_ENDLESS = "TestTxnEtl"
"""A test of franz-go that waits for transactions without end: it is listed, and not run."""

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("STREAMMETA_KAFKA_SUITES"),
        reason="the suites of Kafka clients take long: run ./scripts/test --kafka-suites",
    ),
    pytest.mark.timeout(_LIMIT_S + 60),
    pytest.mark.process,
]


def _listed(suite: str) -> set[str]:
    """Return the tests of a suite that docs/kafka.md lists as failing."""
    text = (_ROOT / "docs" / "kafka.md").read_text("utf-8").partition(_HEADING)[2]
    cells = [line.split("|")[1:-1] for line in text.partition("\n## ")[0].splitlines()]
    rows = [[cell.strip() for cell in row] for row in cells if len(row) == 3]
    names = [name for row in rows if row[0] == suite for name in re.findall(r"`([^`]+)`", row[1])]
    assert len(names) == len(set(names)), "a test is listed twice"
    return set(names)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with running_brokers(tmp_path) as brokers:
        yield brokers.start(1, "--linger", "1ms")


def _run(command: list[str], folder: Path, log: Path, variables: Mapping[str, str]) -> str:
    """Run a suite; return what it prints, which is kept in a log too."""
    with log.open("wb") as out:
        subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **variables},
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
            check=False,
        )
    return log.read_text("utf-8", errors="replace")


def test_franz_go(address: str, tmp_path: Path) -> None:
    folder = _SUITES / "franz-go"
    printed = _run(
        [
            str(folder / "kgo.test"),
            "-test.v",
            f"-test.timeout={_LIMIT_S}s",
            f"-test.skip=^{_ENDLESS}$",
        ],
        folder / "pkg" / "kgo",
        tmp_path / "franz-go.log",
        {
            "KGO_SEEDS": address,
            "KGO_TEST_RF": "1",
            "KGO_TEST_RECORDS": "5000",
            "KGO_LOG_LEVEL": "none",
        },
    )
    ended = re.findall(r"^--- (PASS|FAIL): (\w+)", printed, re.MULTILINE)
    failed = {name for outcome, name in ended if outcome == "FAIL"}
    assert "panic:" not in printed, printed[-2000:]
    assert len(ended) > 100, printed[-2000:]
    assert failed | {_ENDLESS} == _listed("franz-go")


def test_kafka_python(address: str, tmp_path: Path) -> None:
    folder, report = _SUITES / "kafka-python", tmp_path / "report.xml"
    options = ["-p", "no:cacheprovider", "-o", "asyncio_mode=strict", "--timeout=120"]
    printed = _run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *options,
            f"--junitxml={report}",
            "test/integration",
        ],
        folder,
        tmp_path / "kafka-python.log",
        {
            "KAFKA_URI": f"kafka://{address}",
            "KAFKA_VERSION": "4.0",
            "KAFKA_ROOT": str(tmp_path),
            "PYTHONPATH": str(folder),
        },
    )
    cases = list(ET.parse(report).iter("testcase"))
    failed = {
        re.sub(r"\[.*", "", case.get("name", ""))
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    assert len(cases) > 50, printed[-2000:]
    assert failed == _listed("kafka-python")
