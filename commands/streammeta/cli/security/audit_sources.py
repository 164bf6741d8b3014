"""Sources of `streammeta audit verify`: files that may still be written, and anchors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from streammeta.cli.framework.client import ControllerClient, describe_cluster
from streammeta.cli.framework.output import CommandError
from streammeta.tls.files import CallerFiles

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
