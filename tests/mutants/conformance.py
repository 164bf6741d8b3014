"""Mutants of the brokers' shapes that scenarios of other systems' tests catch."""

from tests.mutants.mutant import Mutant, Tested

_FACTS = "tests/conformance/test_shape_scenarios.py::test_every_fact_is_looked_at"

CONFORMANCE = (
    Mutant(
        "upload-that-landed-counts-as-failed",
        "A commit whose error carries the expected end reports a failure.",
        "TieredStoreException with a position",
        """
        streammeta.brokers.rocketmq.segments.file_segment:
        - if error.position != body.end:
        + if error.position != body.position:
        """,
        Tested(f"{_FACTS}[segment_commit_exceptions]"),
    ),
    Mutant(
        "items-of-a-commit-are-rewritten",
        "Consume queue items get a physical offset, as messages do.",
        "FileSegmentInputStream of another type",
        """
        streammeta.brokers.rocketmq.segments.file_segment:
        - if self.kind is SegmentType.COMMIT_LOG:
        + if self.kind is not SegmentType.INDEX:
              return commit_log_body(self.commit_offset, buffers, self.commit_position)
        """,
        Tested(f"{_FACTS}[segment_consume_queue]"),
    ),
    Mutant(
        "reads-of-a-deleted-source",
        "With bookkeeper-first, a read goes to the source that the list says is deleted.",
        "ManagedLedgerImpl with bookkeeper-first reads",
        """
        streammeta.brokers.pulsar.ledger_list:
        - return bool(context.source_deleted) or not source_first
        + return not source_first
        """,
        Tested(f"{_FACTS}[read_choice]"),
    ),
    Mutant(
        "index-of-an-unknown-version-is-read",
        "An index object of another format version is read as if it had this one.",
        "offloaders of two releases on one bucket",
        """
        streammeta.brokers.pulsar.formats.object_names:
        - return found.get(VERSION_KEY) == VERSION
        + return VERSION_KEY in found
        """,
        Tested(f"{_FACTS}[offload_unknown_index_version]"),
    ),
    Mutant(
        "segment-rolls-once-it-is-too-large",
        "A segment grows by a batch beyond its limit before the next one begins.",
        "log.segment.bytes compared before the append",
        """
        streammeta.brokers.partition.segments:
        - if active.size + batch_bytes > limits.bytes:
        + if active.size > limits.bytes:
              return True
        """,
        Tested(f"{_FACTS}[log_rolls_by_size]"),
    ),
    Mutant(
        "compaction-of-a-map-loses-its-oldest-value",
        "A value that was not written again is below the start of its MetaStream.",
        "MetaStream compaction that trims to the newest live value",
        """
        streammeta.brokers.partition.meta_map:
        - return min((offset for offset, _ in self.live.values()), default=self.end_offset)
        + return max((offset for offset, _ in self.live.values()), default=self.end_offset)
        """,
        Tested(f"{_FACTS}[meta_stream_forced_compaction]"),
    ),
    Mutant(
        "streaming-header-without-its-ledger",
        "The header of a streaming block names ledger 0.",
        "DataBlockHeaderV2",
        """
        streammeta.brokers.pulsar.formats.blocks:
        - return cls(length, first, ledger_id if magic == STREAMING_MAGIC else None)
        + return cls(length, first, 0 if magic == STREAMING_MAGIC else None)
        """,
        Tested(f"{_FACTS}[streaming_block_header]"),
    ),
)
