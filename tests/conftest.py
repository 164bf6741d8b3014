"""Rules for all tests: selection of the slow ones, and how workers share the tests.

Slow tests (long simulations, storms of faults, most seeds) run with `--slow`. A worker runs one
file after the other. Those that start processes come first, on three workers at a time, so that a
machine of two cores has three clusters to carry until nothing else is left: most of their time is
waiting. Tests whose processes only compute, and wait for no clock, stay together. Generated
examples have no time limit, since machines are held up, and a failure prints its replay. The user's
own settings do not count.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, settings

_GROUPS = {"spark": "computations", "process": "processes {}", "s3": "processes {}"}
"""Worker group by mark; the first mark that a test has decides, unless it names a group itself."""

_CLUSTERS_MAX = 3

settings.register_profile(
    "held-up machines",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("held-up machines")

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Hundreds of processes are started, each of which would compile the product anew."""

os.environ["XDG_CONFIG_HOME"] = str(Path(__file__).parent / "no-settings")
"""Profiles of the user that runs the tests are none of theirs."""

yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[assignment, misc]
"""A tenth of the time, for the same documents."""

gc.disable()
"""Collected tests stay until the end: a quarter of a collection was a search for garbage."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this hook too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_spread = config.pluginmanager.hasplugin("xdist")
    for item in items:
        groups = [group for mark, group in _GROUPS.items() if item.get_closest_marker(mark)]
        if is_spread and groups and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(groups[0].format(item.path.stem)))
        if item.get_closest_marker("slow") and not config.getoption("slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Files(LoadGroupScheduling):  # type: ignore[misc]
        """Gives a worker one group, or else one file, after the other."""

        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return scope.partition("::")[0]

        def _assign_work_unit(self, node: Any) -> None:
            others = [work for other, work in self.assigned_work.items() if other is not node]
            clusters = sum(
                any(
                    _has_processes(scope) and not all(tests.values())
                    for scope, tests in work.items()
                )
                for work in others
            )
            may_have_one = clusters < _CLUSTERS_MAX

            def turn(scope: str) -> tuple[bool, bool]:
                return _has_processes(scope) != may_have_one, scope != "computations"

            self.workqueue.move_to_end(min(self.workqueue, key=turn), last=False)
            super()._assign_work_unit(node)

    return Files(config, log)


def _has_processes(scope: str) -> bool:
    return scope.startswith("processes ")
