"""What holds for all tests: which run only when asked for, and which run one after the other.

Long simulations and long storms of faults run with `-m slow`. Tests that start processes of their
own stay together on one worker, so that a machine of two cores has never two clusters to carry.
Generated examples have no time limit, since machines are held up, and a failure prints its replay.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

_STARTING_PROCESSES = ("process", "s3", "spark")

settings.register_profile(
    "held-up machines",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("held-up machines")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this hook too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if any(map(item.get_closest_marker, _STARTING_PROCESSES)):
            item.add_marker(pytest.mark.xdist_group("processes"))
        if item.get_closest_marker("slow") and "slow" not in config.getoption("markexpr"):
            item.add_marker(pytest.mark.skip(reason="long; run with -m slow"))
