"""Benchmarks of appending, reading and the object format measure every way, by names that stay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts.benchmarks import appending, object_format, reading


@pytest.mark.process
def test_both_calls_are_measured(tmp_path: Path) -> None:
    settings = appending.Settings(stores=("directory",), streams=3, seconds=0.5)
    outcome = asyncio.run(appending.measure(tmp_path / "place", settings, lambda _: None))
    rows = outcome.tables[0].rows
    assert [row[:2] for row in rows] == [("directory", "append"), ("directory", "append_many")]
    for name, detail in outcome.details.items():
        assert detail["acknowledgements"] > 0, name
        assert detail["paced_per_s"] == pytest.approx(detail["flooded_per_s"] / 10)
    assert all(value > 0 for value in outcome.figures.values())


@pytest.mark.process
def test_every_way_of_reading_is_measured(tmp_path: Path) -> None:
    settings = reading.Settings(
        streams=2, total_mib=1, random_reads=5, tail_commits=2, tail_records=3
    )
    said: list[str] = []
    outcome = asyncio.run(reading.measure(tmp_path / "place", settings, said.append))
    assert [row[0] for row in outcome.tables[0].rows] == ["sequential", "random", "tailing"]
    assert all(value > 0 for value in outcome.figures.values())
    assert outcome.figures["sequential_fetched_mib_per_mib"] >= 1
    assert outcome.tables[0].rows[0][1] == 1.0
    assert len(said) == 4


def test_every_figure_is_there_and_the_share_is_that_of_the_figures() -> None:
    settings = object_format.Settings(
        payloads=(1000,), entries=(1, 50), volume=1_000_000, searches=200
    )
    said: list[str] = []
    outcome = object_format.measure(Path(), settings, said.append)
    coding = {f"{name}_1000_gb_per_s" for name in ("memcpy", "encode", "encode_crc", "decode")}
    searching = {f"{name}_{n}_ns" for name in ("find",) for n in (1, 50)}
    share = "encode_1000_share_of_memcpy"
    assert outcome.figures.keys() == coding | searching | {share}
    assert all(value > 0 for value in outcome.figures.values())
    encode, memcpy = (outcome.figures[f"{name}_1000_gb_per_s"] for name in ("encode", "memcpy"))
    assert outcome.figures[share] == pytest.approx(encode / memcpy, abs=0.01)
    assert [len(table.rows) for table in outcome.tables] == [1, 2]
    assert len(said) == 3
