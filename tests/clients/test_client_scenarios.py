"""One table of steps, `scenarios.yaml`, run by the clients of all languages on real clusters."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.controller.features import SUPPORTED
from tests.clients.python_runner import run_scenario
from tests.kit.real_cluster import STEADY, raise_level, running_cluster

# On a new machine the first build compiles gRPC, besides other tests.
pytestmark = [pytest.mark.process, pytest.mark.timeout(1200)]

_ROOT = Path(__file__).resolve().parents[2]
_SCENARIOS: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("scenarios.yaml").read_text()
)
_BUILD_LIMIT_S = 600


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with running_cluster(tmp_path, options=STEADY) as running:
        raise_level(running, SUPPORTED.highest)
        yield running


async def test_the_python_client_runs_every_scenario(cluster: LocalCluster) -> None:
    for scenario in _SCENARIOS:
        await run_scenario(cluster.endpoints, scenario)


@pytest.fixture(scope="module")
def go_modules() -> None:
    """Skip tests of the client in Go where its compiler or its modules can't be had."""
    if shutil.which("go") is None:
        pytest.skip("go is not installed")
    try:
        run_go(_ROOT / "clients" / "go", "mod", "download")
    except AssertionError as error:
        pytest.skip(f"the modules of the client in Go can't be fetched: {error}")


def run_go(folder: Path, *words: str, **environment: str) -> str:
    """Run the go command in a folder, and return its output."""
    # Go writes into the folder of settings, which is a folder of the tests here.
    kept = {name: value for name, value in os.environ.items() if name != "XDG_CONFIG_HOME"}
    run = subprocess.run(
        ["go", *words],
        cwd=folder,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=_BUILD_LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.usefixtures("go_modules")
def test_the_go_client_runs_every_scenario(cluster: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "scenarios.json"
    file.write_text(json.dumps(_SCENARIOS))
    printed = run_go(
        _ROOT / "clients" / "go",
        *("test", "-count=1", "-v", "-run", "TestScenarios", "."),
        STREAMMETA_ENDPOINTS=",".join(cluster.endpoints),
        STREAMMETA_SCENARIOS=str(file),
    )
    assert printed.count("--- PASS: TestScenarios/") == len(_SCENARIOS), printed


@pytest.mark.usefixtures("go_modules")
def test_the_lines_of_the_page_on_go_run(cluster: LocalCluster, tmp_path: Path) -> None:
    shell, example = re.findall(r"```(?:sh|go)\n(.*?)```", (_ROOT / "docs/go.md").read_text(), re.S)
    folder = tmp_path / "example"
    folder.mkdir()
    program = _PROGRAM.replace("EXAMPLE", example.replace("127.0.0.1:9091", cluster.endpoints[0]))
    (folder / "main.go").write_text(program)

    run_go(folder, "mod", "init", "example")
    for line in shell.replace("/path/to/streammeta", str(_ROOT)).splitlines():
        run_go(folder, *line.removeprefix("go ").split())
    assert "committed" in run_go(folder, "run", ".")


_PROGRAM = """package main

import (
	"context"
	"fmt"
	"time"

	streammeta "streammeta.io/go"
)

func run(ctx context.Context) error {
EXAMPLE
	return err
}

func main() {
	if err := run(context.Background()); err != nil {
		panic(err)
	}
	fmt.Println("committed")
}
"""
