"""The benchmark of the object format says what it measured, by names that stay."""

from __future__ import annotations

import pytest

from scripts.benchmarks.object_format import Settings, measure


def test_every_figure_is_there_and_the_share_is_that_of_the_figures() -> None:
    settings = Settings(payloads=(1000,), entries=(1, 50), volume=1_000_000, searches=200)
    said: list[str] = []
    outcome = measure(settings, said.append)
    coding = {f"{name}_1000_gb_per_s" for name in ("memcpy", "encode", "encode_crc", "decode")}
    searching = {f"{name}_{n}_ns" for name in ("find",) for n in (1, 50)}
    share = "encode_1000_share_of_memcpy"
    assert outcome.figures.keys() == coding | searching | {share}
    assert all(value > 0 for value in outcome.figures.values())
    encode, memcpy = (outcome.figures[f"{name}_1000_gb_per_s"] for name in ("encode", "memcpy"))
    assert outcome.figures[share] == pytest.approx(encode / memcpy, abs=0.01)
    assert [len(table.rows) for table in outcome.tables] == [1, 2]
    assert len(said) == 3
