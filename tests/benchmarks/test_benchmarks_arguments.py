"""The options of the benchmarks as words for the other tree of a comparison."""

from __future__ import annotations

import re

import pytest

from scripts.benchmarks.arguments import as_words, parse


def kinds_of_benchmarks(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The names that the help has."""
    with pytest.raises(SystemExit):
        parse(["--help"])
    (names,) = re.findall(r"^  (failover\|\S+)$", capsys.readouterr().out, re.M)
    return str(names).split("|")


def test_what_was_not_given_is_the_same_in_the_other_tree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = kinds_of_benchmarks(capsys)
    assert {"reconcile", "all"} <= set(names)
    for name in names:
        arguments = parse([name])
        assert vars(parse(as_words(arguments))) == vars(arguments)


def test_what_was_given_is_the_same_in_the_other_tree() -> None:
    words = ["reconcile", "--joined", "300,4000", "--runs", "2", "--engines", "local"]
    arguments = parse(words)
    assert vars(parse(as_words(arguments))) == vars(arguments)
    assert parse(as_words(parse(["failover", "--seed", "0"]))).seed == 0


def test_the_comparison_itself_is_not_passed_on() -> None:
    arguments = parse(["reconcile", "--baseline", "main", "--rounds", "7", "--format", "json"])
    assert as_words(arguments) == as_words(parse(["reconcile"]))
