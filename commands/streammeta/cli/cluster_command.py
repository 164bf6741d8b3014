"""`streammeta cluster`: questions to all members of a cluster at once."""

from __future__ import annotations

from collections.abc import Iterator

import click

from streammeta.cli.client import connect_option, timeout_option
from streammeta.cli.output import CommandError, OutputFormat, command_output, format_option
from streammeta.cli.state_comparison import Comparison, Verdict, compare_members

HASH_TIMEOUT_S = 60.0
"""Every member looks at its whole map; a large one takes seconds."""

_COLUMNS = ("node_id", "leader", "endpoint", "verdict", "state_hash", "log_hash", "problem")


@click.group()
def cluster() -> None:
    """Look at all members of a cluster at once.

    \b
    Example:
      streammeta cluster hash --connect 127.0.0.1:9091
    """


@cluster.command("hash")
@connect_option
@timeout_option(HASH_TIMEOUT_S)
@format_option
def hash_command(connect: tuple[str, ...], timeout_s: float, output_format: OutputFormat) -> None:
    """Compare the maps of all members at one offset of the log; exit 1 unless all are equal.

    Asks the leader's voters and the controllers that --connect names, while writes go on. The state
    hash is of the map, the log hash of every record that led to it. Observers that --connect does
    not name are listed as `not asked`, and are no failure: their addresses are not known.

    \b
    Example:
      streammeta cluster hash --connect 127.0.0.1:9091,127.0.0.1:9092
    """
    with command_output(output_format) as output:
        compared = compare_members(connect, timeout_s)
        problem = _problem(compared)
        output.summary(
            {
                "cluster_id": compared.cluster_id,
                "at_offset": compared.at_offset,
                "verdict": "ok" if problem is None else problem.code,
            }
        )
        output.note("")
        output.rows("members", _COLUMNS, _rows(compared))
        if problem is not None:
            problem.details = output.collected
            raise problem


def _rows(compared: Comparison) -> Iterator[tuple[object, ...]]:
    for state in compared.members:
        yield (
            state.member.node_id,
            state.member.is_leader,
            state.member.endpoint or None,
            str(state.verdict),
            state.state_hash or None,
            state.log_hash or None,
            state.problem or None,
        )


def _problem(compared: Comparison) -> CommandError | None:
    different = compared.of(Verdict.DIFFERENT)
    if different:
        names = ", ".join(f"controller {each.member.node_id}" for each in different)
        return CommandError(
            "DIFFERENT",
            f"{names}: the map at offset {compared.at_offset} differs from that of the others",
            "keep a copy of its data directory and report the defect; then stop it and replace its "
            "disk as docs/operations.md says, so that it takes the map from the leader",
        )
    silent = compared.of(Verdict.NO_ANSWER)
    if silent:
        names = ", ".join(
            each.member.endpoint
            if each.member.node_id is None
            else f"controller {each.member.node_id}"
            for each in silent
        )
        return CommandError(
            "NO_ANSWER",
            f"{names}: no answer, so it was not compared; the others are equal",
            "start it, or name its address in --connect, then repeat",
        )
    return None
