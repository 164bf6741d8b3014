"""How `streammeta storage` shows what is in a data directory."""

from collections.abc import Iterator

from streammeta.cli.output import Output
from streammeta.controller.journal.inspection import DirectoryFacts

DAMAGE_COLUMNS = ("file", "byte", "offset", "what")


def damage_rows(facts: DirectoryFacts) -> Iterator[tuple[object, ...]]:
    """Return one row for each damaged place; `offset` is the end of the good log before it."""
    for finding in facts.findings:
        yield finding.file, finding.byte, finding.offset, finding.what


def tell_facts(output: Output, facts: DirectoryFacts) -> None:
    """Say all that is known of a directory."""
    output.summary(_identity_facts(facts) | _log_facts(facts))
    tables = (
        (
            "bootstrap_voters",
            ("node_id", "endpoint", "directory_id"),
            [
                (voter.key.node_id, voter.endpoint, voter.key.directory_id)
                for voter in facts.identity.bootstrap_voters
            ],
        ),
        ("epochs", ("epoch", "start_offset"), [(e.epoch, e.start_offset) for e in facts.epochs]),
        (
            "segments",
            ("file", "base_offset", "end_offset", "bytes"),
            [(s.name, s.base_offset, s.end_offset, s.size) for s in facts.segments],
        ),
        (
            "snapshots",
            ("file", "end_offset", "epoch", "bytes"),
            [
                (s.name, s.snapshot_id.end_offset, s.snapshot_id.epoch, s.size)
                for s in facts.snapshots
            ],
        ),
        ("damage", DAMAGE_COLUMNS, list(damage_rows(facts))),
        ("put_aside", ("file",), [(name,) for name in facts.put_aside]),
    )
    for name, columns, rows in tables:
        if rows:
            output.note("")
        if rows or output.format == "json":
            output.rows(name, columns, rows)


def _identity_facts(facts: DirectoryFacts) -> dict[str, object]:
    identity, state = facts.identity, facts.state
    vote = state.vote if state else None
    return {
        "cluster_id": identity.cluster_id,
        "node_id": identity.node_id,
        "directory_id": identity.directory_id,
        "epoch": state.epoch if state else None,
        "leader_id": state.leader_id if state else None,
        "voted_id": vote.node_id if vote else None,
        "voted_directory_id": vote.directory_id if vote else None,
    }


def _log_facts(facts: DirectoryFacts) -> dict[str, object]:
    lost = facts.record.lost if facts.record else None
    return {
        "log_start_offset": facts.start_offset,
        "log_end_offset": facts.end_offset,
        "flushed_end_offset": facts.flushed_end,
        "batches": facts.batch_count,
        "unflushed_torn_bytes": facts.torn_bytes,
        "reserve_bytes": facts.reserve_bytes,
        "repairs_up_to_offset": lost.end_offset if lost else None,
    }
