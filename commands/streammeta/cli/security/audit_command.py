"""`streammeta audit`: verification and search of audit logs.

Works on files, and compares them with anchors in the metadata of a cluster if one is named.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from streammeta.cli.framework.client import DEADLINE_S, ControllerClient, describe_cluster
from streammeta.cli.framework.connecting import Endpoints, connecting, timeout_option
from streammeta.cli.framework.output import CommandError, Duration, Output, with_output
from streammeta.tls.files import CallerFiles

_FILES = click.argument(
    "files",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
)

_SHOWN = ("ts", "node", "principal", "call", "verdict", "reason", "offset", "target")
_CHAINS = ("node", "lines", "first_seq", "last_seq", "dropped", "torn", "head")
_BREAKS = ("node", "file", "line", "problem")


@click.group()
def audit() -> None:
    """Verify and search the audit logs that controllers write.

    \b
    Example:
      streammeta audit verify audit.log audit.log.000000120034
    """


class _KnownHash(click.ParamType[tuple[int, str]]):
    name = "SEQ:HASH"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, str]:
        """Parse the number and the hash of a line."""
        seq, colon, digits = str(value).partition(":")
        is_hash = len(digits) == 64 and set(digits) <= set("0123456789abcdef")
        if not (colon and seq.isdecimal() and is_hash):
            self.fail(
                f"{value!r}, expected the number and the hash of a line, as in 120034:9f..",
                param,
                ctx,
            )
        return int(seq), digits


@audit.command("verify")
@_FILES
@click.option(
    "--expect",
    "expected",
    multiple=True,
    type=_KnownHash(),
    metavar="SEQ:HASH",
    help="Known hash of a line, which the controller's log contains each minute. Repeatable,"
    " with the files of one controller.",
)
@click.option(
    "--map",
    "map_address",
    metavar="MAP",
    help="Compare the ends with the anchors in this metadata: a checkpoint file, the folder"
    " of a Parquet export, or BACKUP_URI@OFFSET.",
)
@connecting(Endpoints.OPTIONAL)
@timeout_option(DEADLINE_S)
@with_output
def verify_command(
    *,
    files: Sequence[Path],
    expected: Sequence[tuple[int, str]],
    map_address: str | None,
    connect: tuple[str, ...] | None,
    tls: CallerFiles | None,
    timeout_s: float,
    output: Output,
) -> None:
    """Check that no line was changed, removed or moved. Exit 1 and name the place otherwise.

    The command accepts the files of one or more controllers, in any order. Name all files of the
    period. With --connect or --map, include the newest files: the command then also checks that
    their ends were not cut off, except for the last ten seconds of the leader's log.

    \b
    Examples:
      streammeta audit verify /var/log/streammeta/audit.log*
      streammeta audit verify /var/log/streammeta/audit.log* --connect 127.0.0.1:9091
    """
    from streammeta.controller.trust.audit.check import split, verify

    # Before the files are read: lines are written before they are anchored.
    anchored = anchored_lines(map_address, connect, tls, timeout_s)
    # Anchors name the newest lines, so the files are read up to their ends.
    read = [
        split(str(path), data)
        for path, data in read_files(files, to_the_end=bool(anchored)).items()
    ]
    chains = verify(read, dict(expected), anchored)
    output.rows(
        "chains", _CHAINS, [tuple(getattr(chain, name) for name in _CHAINS) for chain in chains]
    )
    breaks = [
        (chain.node, break_.file, break_.line, break_.problem)
        for chain in chains
        for break_ in chain.breaks
    ]
    if breaks:
        output.rows("breaks", _BREAKS, breaks)
        _, file, line, problem = breaks[0]
        raise CommandError(
            "AUDIT_CHAIN",
            f"{file}:{line}: {problem}" if file else problem,
            "the audit log was changed or cut, or files are missing. Keep all files unchanged",
        )


@audit.command("show")
@_FILES
@click.option("--principal", help="Only lines of this principal, such as broker/1007.")
@click.option(
    "--call", "calls", multiple=True, help="Only lines whose call ends with this text. Repeatable."
)
@click.option("--verdict", "verdicts", multiple=True, help="Only lines with this verdict.")
@click.option("--since", type=Duration(), metavar="DURATION", help="Only lines younger than this.")
@with_output
def show_command(
    *,
    files: Sequence[Path],
    principal: str | None,
    calls: Sequence[str],
    verdicts: Sequence[str],
    since: int | None,
    output: Output,
) -> None:
    """Show lines of audit logs, without checking their chain.

    \b
    Example:
      streammeta audit show audit.log --principal admin/alice --since 24h
    """
    # Times are ISO 8601 in UTC, and so can be compared as text.
    after = "" if since is None else f"{datetime.now(UTC) - timedelta(milliseconds=since):%FT%T}"
    chosen = [
        members
        for path in files
        for members in _lines(path)
        if (principal is None or members.get("principal") == principal)
        and (not calls or str(members.get("call")).endswith(tuple(calls)))
        and (not verdicts or members.get("verdict") in verdicts)
        and str(members.get("ts")) >= after
    ]
    rows = [
        (*(members.get(name, "") for name in _SHOWN[:-1]), json.dumps(members.get("target", {})))
        # Lines of several controllers are merged by time. `seq` orders lines of one moment.
        for members in sorted(chosen, key=lambda one: (str(one.get("ts")), one["seq"]))
    ]

    output.rows("lines", _SHOWN, rows)


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    from streammeta.controller.trust.audit.check import parse

    with path.open("rb") as file:
        for line in file:
            # Lines that do not parse are skipped. `audit verify` reports them.
            if (members := parse(line)) is not None:
                yield members


_LOOKS_MAX = 10


def read_files(paths: Sequence[Path], *, to_the_end: bool = False) -> Mapping[Path, bytes]:
    """Return the bytes of the files, and of files that were full and renamed meanwhile.

    With `to_the_end` the full file before a log's newest one is read too.
    """
    # A log that is rotated meanwhile would lose lines or show them twice, so look again.
    for _ in range(_LOOKS_MAX):
        before = _full_files(paths)
        wanted = dict.fromkeys((*paths, *_newer(paths, before, to_the_end=to_the_end)))
        try:
            read = {path: path.read_bytes() for path in wanted}
        except FileNotFoundError:
            # No file was renamed, so this one never existed.
            if _full_files(paths) == before:
                raise
            continue
        if _full_files(paths) == before:
            return read

    raise CommandError(
        "AUDIT_FILES", "files were renamed during each attempt to read them", "try again"
    )


def _full_files(paths: Sequence[Path]) -> set[Path]:
    """Return the full files of the logs whose newest file is among the paths."""
    return {
        file
        for path in paths
        for file in path.parent.glob(f"{path.name}.*")
        if file.suffix[1:].isdecimal()
    }


def _newer(paths: Sequence[Path], full: set[Path], *, to_the_end: bool) -> list[Path]:
    """Return the full files that are newer than every given file of the same log."""
    found: list[Path] = []
    for path in paths:
        of_log = sorted((file for file in full if file.stem == path.name), key=_number)
        given = [_number(file) for file in of_log if file in paths]
        if given:
            # The chain continues in newer files and would seem to be cut without them.
            found += [file for file in of_log if _number(file) > max(given)]
        elif to_the_end:
            # Lines that were anchored just before a rotation are in the last full file.
            found += of_log[-1:]
    return found


def _number(full: Path) -> int:
    return int(full.suffix[1:])


def anchored_lines(
    map_address: str | None,
    connect: tuple[str, ...] | None,
    tls: CallerFiles | None,
    timeout_s: float,
) -> Mapping[int, Mapping[int, str]]:
    """Return hashes of anchored lines by controller and number, none without a source."""
    from streammeta.controller.trust.audit.lines import expected_lines

    if map_address is not None:
        return expected_lines(*_in_map(map_address))
    if connect is not None:
        with ControllerClient(connect, timeout_s, tls) as client:
            return expected_lines(*_in_cluster(client))
    return {}


def _in_map(address: str) -> tuple[Mapping[str, bytes], str]:
    from streammeta.cli.inspection.metadata_sources import MetadataSources
    from streammeta.controller.trust.audit.lines import NAMESPACE

    with contextlib.closing(MetadataSources(None, address)) as sources:
        copy = sources.copy()
        kvs = copy.sections["kvs"]
        rows = zip(kvs["namespace"], kvs["key"], kvs["value"], strict=True)
        return {str(key): value for name, key, value in rows if name == NAMESPACE}, copy.cluster_id


def _in_cluster(client: ControllerClient) -> tuple[Mapping[str, bytes], str]:
    from streammeta.controller.trust.audit.lines import NAMESPACE
    from streammeta.v1.kv_pb2 import ListKVsRequest
    from streammeta.v1.kv_pb2_grpc import KVServiceStub

    listed = client.call(
        lambda channel: KVServiceStub(channel).ListKVs, ListKVsRequest(namespace=NAMESPACE)
    )
    return {entry.key: entry.value for entry in listed.entries}, describe_cluster(client).cluster_id
