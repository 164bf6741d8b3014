"""Rules for all tests: selection of the slow ones, and how workers share the tests.

Slow tests (long simulations, storms of faults, most seeds) run with `--slow`. A worker runs one
file after the other. Those that start processes come first, on three workers at a time, so that a
machine of two cores has three clusters to carry until nothing else is left: most of their time is
waiting. Files whose tests may take long begin before others, so that none is alone at the end.
Tests whose processes only compute, and wait for no clock, stay together. Generated examples have no
time limit, since machines are held up, and a failure prints its replay. The user's own settings do
not count.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, settings

_TOGETHER = "computations"
"""The group of tests whose processes only compute."""

_KINDS = {"spark": _TOGETHER, "process": "processes", "s3": "processes"}
"""Kind of a worker's group by mark; the first mark that a test has decides, unless it names one."""

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

os.environ["PYTHONFAULTHANDLER"] = "1"
"""Children that hang are ended by SIGABRT, and print their stacks."""

yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[assignment, misc]
"""A tenth of the time, for the same documents."""

gc.disable()
"""Collected tests stay until the end: a quarter of a collection was a search for garbage."""


def pytest_configure() -> None:
    """Let children be interrupted: background jobs of a shell ignore SIGINT, and pass that on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this hook too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
    if config.pluginmanager.hasplugin("xdist"):
        _group(items, float(config.getini("timeout")))


def _group(items: list[pytest.Item], usual_s: float) -> None:
    """Name groups by what tests do: the scheduler sees nothing but names."""
    long_files = {
        item.path
        for item in items
        if not item.get_closest_marker("skip")
        and (mark := item.get_closest_marker("timeout"))
        and mark.args[0] > usual_s
    }
    for item in items:
        kinds = [kind for mark, kind in _KINDS.items() if item.get_closest_marker(mark)][:1]
        words = [*kinds, *(["long"] if item.path in long_files else [])]
        if words and not item.get_closest_marker("xdist_group"):
            name = kinds[0] if kinds == [_TOGETHER] else " ".join([*words, item.path.stem])
            item.add_marker(pytest.mark.xdist_group(name))


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

            def turn(scope: str) -> tuple[bool, bool, bool]:
                is_other_kind = _has_processes(scope) != may_have_one
                return is_other_kind, scope != _TOGETHER, " long " not in f" {scope}"

            self.workqueue.move_to_end(min(self.workqueue, key=turn), last=False)
            super()._assign_work_unit(node)

    return Files(config, log)


def _has_processes(scope: str) -> bool:
    return scope.startswith("processes ")
