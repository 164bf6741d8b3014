"""The checks of prose and of commit subjects find a sentence, or a subject, that breaks a rule."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.kit.tools import needs

ROOT = Path(__file__).resolve().parents[2]

GOOD = """# Page

The leader rejects the commit. It logs the reason; the broker retries.
"""

BAD = {
    "Semicolons": "A node starts; it reads the log; it serves.",
    "WhatAsNoun": "A node repairs what is damaged.",
    "ReplaceWith": "One commit replaces many objects by a few.",
    "Inversion": "Of several identities the node has one.",
    "ThatOf": "The epoch exceeds that of the leader.",
    "Passive": "The commit is refused.",
    "Words": "The leader is told of the commit.",
    "Negation": "A certificate is no authority.",
    "Terms": "The leader reads the map.",
}
"""By rule of scripts/vale, a sentence that breaks it."""


UNKNOWN = "The leader acknowleges the commit."


def run(script: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / script, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_rule_has_a_sentence_that_breaks_it() -> None:
    assert {path.stem for path in (ROOT / "scripts/vale/Streammeta").glob("*.yml")} == set(BAD)


@needs("vale")
def test_good_prose_has_no_finding(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(GOOD)
    done = run("prose", page)
    assert (done.returncode, done.stdout) == (0, "")


@needs("vale")
@pytest.mark.parametrize("rule", BAD)
def test_a_sentence_that_breaks_a_rule_is_found(tmp_path: Path, rule: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{GOOD}\n{BAD[rule]}\n")
    done = run("prose", page)
    assert done.returncode == 1
    assert f"{page}:5:" in done.stdout
    assert f":Streammeta.{rule}:" in done.stdout


@needs("vale")
def test_a_word_of_no_vocabulary_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{GOOD}\n{UNKNOWN}\n")
    done = run("prose", page)
    assert done.returncode == 1
    assert "acknowleges" in done.stdout


@needs("vale")
@pytest.mark.parametrize("line", ['"""Index of what is deleted."""', "# The peer is told."])
def test_docstrings_and_comments_are_checked(tmp_path: Path, line: str) -> None:
    module = tmp_path / "module.py"
    module.write_text(f"{line}\nPORT = 9090\n")
    assert run("prose", "--code", module).returncode == 1


@needs("vale")
def test_pages_have_no_finding() -> None:
    done = run("prose")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "subject",
    [
        "Rejects headers without a path",
        "rpc: Rejects headers",
        "rpc: rejected headers without a path",
        "rpc: rejecting headers without a path",
        f"rpc: reject {'x' * 61}",
    ],
)
def test_a_subject_of_another_form_is_found(tmp_path: Path, subject: str) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\nA body.\n")
    done = run("check_subjects", "--message", message)
    assert done.returncode == 1
    assert subject in done.stderr


@pytest.mark.parametrize(
    "subject", ["rpc: reject headers without a path", "ci: embed the log", "Merge branch 'x'"]
)
def test_a_subject_of_the_form_passes(tmp_path: Path, subject: str) -> None:
    message = tmp_path / "message"
    message.write_text(f"# comment\n{subject}\n")
    assert run("check_subjects", "--message", message).returncode == 0
