"""A Prometheus that scrapes controllers of a test, and evaluates the alerts in deploy/prometheus.

`tests.kit.tools` tells where it is.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from streammeta.cli.local.local_cluster import free_ports
from tests.kit.tools import path_of
from tests.kit.waiting import wait_until
from tests.monitoring.http_calls import get
from tests.monitoring.test_alerts import RULES

JOB = "streammeta"
BROKERS = "brokers"
"""Job of what is scraped beside controllers."""

HOLDS = "10s"
"""Time that an alert's condition has to hold, instead of the minutes of the rules."""

WINDOW = "[30s]"
"""Range of the rates in the rules, instead of 5 minutes, which would outlive the tests."""


@dataclass
class Prometheus:
    """A running one."""

    endpoint: str
    since: float = 0
    """Time, in seconds since the epoch, from which all targets have values."""

    def wait_scraped(self, targets: int) -> None:
        wait_until(lambda: self._scraped(targets), f"{targets} targets to be scraped")
        self.since = time.time()

    def _scraped(self, targets: int) -> bool:
        up = f'count(up{{job="{JOB}"}} == 1) == {targets}'
        return bool(self.query(up)) and "StreammetaNoLeader" not in self.firing()

    def query(self, expression: str) -> Sequence[dict[str, Any]]:
        """Return the series that an expression gives now."""
        status, text = get(self.endpoint, f"/api/v1/query?query={quote(expression)}")
        assert status == 200, text
        found: Sequence[dict[str, Any]] = json.loads(text)["data"]["result"]
        return found

    def firing(self) -> set[str]:
        """Return the names of alerts that fire now."""
        return _names(self.query('ALERTS{alertstate="firing"}'))

    def fired(self) -> set[str]:
        """Return the names of alerts that have fired since all targets are scraped.

        Before, none has a value, which is what the alert of no leader is for.
        """
        passed = max(1, int(time.time() - self.since))
        return _names(self.query(f'max_over_time(ALERTS{{alertstate="firing"}}[{passed}s])'))


def _names(series: Sequence[dict[str, Any]]) -> set[str]:
    return {series["metric"]["alertname"] for series in series}


@contextlib.contextmanager
def scraping(
    root: Path, targets: Sequence[str], brokers: Sequence[str] = ()
) -> Iterator[Prometheus]:
    """Scrape controllers, and brokers, every two seconds until the block ends."""
    root.mkdir()
    (root / "rules.yml").write_text(json.dumps(_impatient_rules()))
    (root / "prometheus.yml").write_text(json.dumps(_configuration(targets, brokers)))
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                path_of("prometheus"),
                f"--config.file={root / 'prometheus.yml'}",
                f"--storage.tsdb.path={root / 'data'}",
                f"--web.listen-address={endpoint}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: _is_ready(endpoint), "Prometheus to be ready")
        prometheus = Prometheus(endpoint)
        prometheus.wait_scraped(len(targets))
        yield prometheus
    finally:
        process.terminate()
        process.wait(timeout=60)


def _is_ready(endpoint: str) -> bool:
    try:
        return get(endpoint, "/-/ready")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def _configuration(targets: Sequence[str], brokers: Sequence[str]) -> dict[str, Any]:
    jobs = {JOB: targets, BROKERS: brokers}
    return {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": list(of)}]}
            for name, of in jobs.items()
        ],
    }


def _impatient_rules() -> dict[str, Any]:
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = HOLDS
            rule["expr"] = rule["expr"].replace("[5m]", WINDOW)
    return rules
