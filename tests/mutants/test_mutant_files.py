"""The reader of the catalogue's files returns all parts of a mutant and names the wrong line."""

from pathlib import Path

import pytest

from tests.mutants import mutant
from tests.mutants.mutant import Edit, Mutant, Simulated
from tests.mutants.mutant_files import MutantFileError, parse_mutants, read_mutants

_FILE = """
# Mutants of doors.

DOORS = tests/trust/test_doors.py

# Locks

== open-door
bug: A door stays open.
seen: every house, since the first
caught by: DOORS::test_a_door[front door]
@ streammeta.doors
  if locked:
-     turn(key)

      # A comment.
  return key
@ streammeta.keys
+ lose()

== rare-key
bug: A key fits every lock.
seen: the house next to it
caught by: simulator crashy 3:40 rare
@ streammeta.keys
- return 1
+ return 2
"""


def test_every_part_of_a_mutant_is_read() -> None:
    lock = (
        "  if locked:",
        "-     turn(key)",
        "",
        "      # A comment.",
        "  return key",
    )
    assert parse_mutants(_FILE, "doors.mutants") == [
        Mutant(
            "open-door",
            "A door stays open.",
            "every house, since the first",
            (Edit("streammeta.doors", lock), Edit("streammeta.keys", ("+ lose()",))),
            mutant.Tested("tests/trust/test_doors.py::test_a_door[front door]"),
        ),
        Mutant(
            "rare-key",
            "A key fits every lock.",
            "the house next to it",
            (Edit("streammeta.keys", ("- return 1", "+ return 2")),),
            Simulated("crashy", range(3, 40), is_rare=True),
        ),
    ]


def test_the_example_for_contributors_is_read() -> None:
    page = Path(__file__).parents[2].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    example = page[page.index("ELECTION = ") :].partition("```")[0]
    (example_mutant,) = parse_mutants(example, "CONTRIBUTING.md")
    assert example_mutant.name == "election-without-a-majority"


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("== open-door", "== Open door", 8, "== name"),
        ("bug: A door stays open.", "bug: A door", 9, "bug: "),
        ("seen: every", "every", 10, "seen: "),
        ("caught by: DOORS::test_a_door[front door]", "caught by: DOORS", 11, "caught by: "),
        ("caught by: DOORS", "caught by: GATES", 11, "short name"),
        ("@ streammeta.doors", "@ doors", 12, "@ streammeta"),
        ("-     turn(key)", "      turn(key)", 18, "begins with"),
        ("  return key", "return key", 17, "line of a diff"),
        ("+ return 2\n", "+ return 2\n== unfinished\n", 28, "bug: "),
    ],
)
def test_an_error_names_the_line_and_the_expected_form(
    old: str, new: str, line: int, expected: str
) -> None:
    with pytest.raises(MutantFileError, match=rf"doors\.mutants:{line}: expected .*{expected}"):
        parse_mutants(_FILE.replace(old, new), "doors.mutants")


def test_a_name_is_used_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.mutants").write_text(_FILE)
    with pytest.raises(MutantFileError, match="open-door"):
        read_mutants(tmp_path)
