"""The simulator finds what it claims to find: each planted mistake is caught within its seeds."""

from __future__ import annotations

import pytest

from tests.sim.sim_sabotage import SABOTAGES, Sabotage
from tests.sim.sim_world import simulate


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.name)
def test_a_planted_mistake_is_caught(sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch) -> None:
    node_class = sabotage.plant(monkeypatch)
    caught = any(
        simulate(seed, sabotage.profile, node_class).failure is not None
        for seed in range(sabotage.seeds)
    )
    assert caught, f"{sabotage.name}: not caught within {sabotage.seeds} seeds"
