"""Options of the benchmarks, and the words that pass them to the other tree of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.benchmarks.registry import ALL, MEMBERS_OF_ALL, MODULES, parse


@pytest.mark.parametrize("name", [*MODULES, ALL])
def test_defaults_are_the_same_in_the_other_tree(name: str) -> None:
    request = parse([name])
    assert parse(request.words()) == request


def test_options_are_the_same_in_the_other_tree() -> None:
    words = ["reconcile", "--joined", "300,4000", "--runs", "2", "--engines", "local"]
    request = parse(words)
    assert parse(request.words()) == request
    assert (request.settings["reconcile"].joined, request.settings["reconcile"].runs) == (
        (300, 4000),
        2,
    )
    (settings,) = parse(parse(["failover", "--seed", "0"]).words()).settings.values()
    assert settings.seed == 0


def test_the_comparison_itself_is_not_passed_on() -> None:
    request = parse(["reconcile", "--baseline", "main", "--rounds", "7", "--format", "json"])
    assert (request.baseline, request.rounds, request.format) == ("main", 7, "json")
    assert request.words() == parse(["reconcile"]).words()


def test_a_flag_and_a_path_are_read(tmp_path: Path) -> None:
    request = parse(["map", "--large", "--plot", "p", "--data-dir", str(tmp_path)])
    assert (request.settings["map"].large, request.settings["map"].plot) == (True, Path("p"))
    assert request.data_dir == tmp_path


def test_all_passes_an_option_to_every_member_that_has_it() -> None:
    settings = parse([ALL, "--tls", "--streams", "3"]).settings
    assert list(settings) == list(MEMBERS_OF_ALL)
    assert settings["failover"].tls
    assert settings["commits"].tls
    assert settings["failover"].kind == ("crash", "pause", "partition")
    assert settings["reading"].streams == 3


@pytest.mark.parametrize(
    "words",
    [
        ["commits", "--ranges", "0"],
        ["commits", "--ranges", "1,x"],
        ["commits", "--seconds", "0.1"],
        ["commits", "--seconds", "601"],
        ["commits", "--ways", "unary,fast"],
        ["failover", "--kind", "flood"],
        ["reconcile", "--engines", "flink"],
        ["map", "--data-dir", "/nonexistent"],
        ["nothing"],
    ],
)
def test_wrong_options_end_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert (
        "expected" in (said := capsys.readouterr().err)
        or "invalid choice" in said
        or "not a" in said
    )
