"""The cost of admitting a caller, measured as briefly as possible."""

from __future__ import annotations

import asyncio
from pathlib import Path

from scripts.benchmarks import authorization


def test_each_kind_of_caller_is_admitted(tmp_path: Path) -> None:
    settings = authorization.Settings(calls=200, turns=1)
    outcome = asyncio.run(authorization.measure(tmp_path, settings, lambda _: None))
    (table,) = outcome.tables
    assert [row[0] for row in table.rows] == [
        "plain text",
        "certificate of a broker",
        "certificate of a user with a grant",
        "token",
    ]
    # Smaller costs are lost in the noise of a busy machine.
    recorded = [cost for name, cost in outcome.figures.items() if "recorded" in name]
    assert len(recorded) == len(table.rows)
    assert min(recorded) > 0
