"""The cost of letting a caller in, measured as shortly as it can be."""

from __future__ import annotations

import asyncio
from pathlib import Path

from scripts.benchmarks import authorization


def test_each_kind_of_caller_is_let_in(tmp_path: Path) -> None:
    settings = authorization.Settings(calls=200, turns=1)
    outcome = asyncio.run(authorization.measure(tmp_path, settings, lambda _: None))
    (table,) = outcome.tables
    assert [row[0] for row in table.rows] == [
        "plain text",
        "certificate of a broker",
        "certificate of a user with a grant",
        "token",
    ]
    assert all(cost > 0 for cost in outcome.figures.values())
