"""The output contract: a failure keeps what the command found before it failed."""

from __future__ import annotations

import json

import click
import pytest

from streammeta.cli.output import CommandError, OutputFormat, command_output, format_option, run_cli


@click.command()
@format_option
def failing(output_format: OutputFormat) -> None:
    """Find something, then fail."""
    with command_output(output_format) as output:
        output.summary({"plan": "p", "error": "a fact with the name of the contract's member"})
        output.rows("classes", ("verdict", "keys"), [("live", 3)])
        raise CommandError("GUARD", "guards failed", "look at them")


def test_a_failure_in_json_is_one_object_with_all_that_was_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_cli(failing, ["--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "error": {"code": "GUARD", "message": "guards failed", "hint": "look at them"},
        "plan": "p",
        "classes": [{"verdict": "live", "keys": 3}],
    }


def test_a_failure_for_people_follows_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(failing, ["--format", "plain"]) == 1
    said = capsys.readouterr()
    assert "live\t3" in said.out
    assert said.err == "streammeta: guards failed\n  look at them\n"
