"""Rules for all tests: selection of the slow ones, and order of those that start processes.

Slow tests (long simulations, storms of faults) run with `--slow`. Tests that start processes are of
three groups by their files, each on one worker, so that a machine of two cores never has more than
three clusters to carry: most of their time is waiting. Those whose processes only compute, and wait
for no clock, stay together apart from them. Generated examples have no time limit, since machines
are held up, and a failure prints its replay. The user's own settings do not count.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_GROUPS = {"spark": "computations", "process": "processes {}", "s3": "processes {}"}
"""Worker group by mark; the first mark that a test has decides, unless it names a group itself."""

_GROUPS_OF_PROCESSES = 3

_SPREAD = 24
"""Start of the checksum of a file's name: with this one the groups take equally long."""

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this hook too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_spread = config.pluginmanager.hasplugin("xdist")
    for item in items:
        groups = [group for mark, group in _GROUPS.items() if item.get_closest_marker(mark)]
        if is_spread and groups and not item.get_closest_marker("xdist_group"):
            number = zlib.crc32(item.path.name.encode(), _SPREAD) % _GROUPS_OF_PROCESSES
            item.add_marker(pytest.mark.xdist_group(groups[0].format(number)))
        if item.get_closest_marker("slow") and not config.getoption("slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
