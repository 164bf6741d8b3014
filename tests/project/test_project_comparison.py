"""The page of comparison: its rows, its count, and that what it calls met is linked to a proof."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"
EXPECTATIONS = 60


def rows() -> list[tuple[int, str, str]]:
    """Number, verdict and proof of each row of the first table."""
    table = PAGE.read_text().partition("## Not met")[0]
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    return [(int(row[1]), row[4], row[5]) for row in cells if len(row) == 7 and row[1].isdigit()]


def test_every_expectation_has_one_row_with_a_verdict() -> None:
    assert [number for number, _, _ in rows()] == list(range(1, EXPECTATIONS + 1))
    assert {verdict for _, verdict, _ in rows()} == {"yes", "no"}


def test_what_is_met_is_linked_to_a_test_or_a_page_and_what_is_not_to_nothing() -> None:
    for number, verdict, proof in rows():
        targets = re.findall(r"\]\(([^)#]+)", proof)
        assert bool(targets) == (verdict == "yes"), number
        for target in targets:
            assert (PAGE.parent / target).is_file(), (number, target)
            assert "tests/" not in target or "\ndef test_" in _code(target), (number, target)


def _code(target: str) -> str:
    return (PAGE.parent / target).read_text().replace("\nasync def", "\ndef")


def test_the_count_is_that_of_the_rows_and_what_is_missing_is_told() -> None:
    text = PAGE.read_text()
    unmet = [number for number, verdict, _ in rows() if verdict == "no"]
    assert f"Met: {EXPECTATIONS - len(unmet)} of {EXPECTATIONS}." in text
    told = re.findall(r"^\| (\d+) \|", text.partition("## Not met")[2], re.M)
    assert [int(number) for number in told] == unmet
