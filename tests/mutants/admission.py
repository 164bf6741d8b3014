"""Mutants of what appends pass: offsets that end, and times that say nothing."""

from tests.mutants.mutant import Mutant, Tested

_WRITER = "tests/broker_client/test_append_admission.py::"
_LOG = "tests/brokers/test_partition_log.py::"

ADMISSION = (
    Mutant(
        "offsets-end-in-the-encoder",
        "An append beyond the largest offset is admitted, and fails when its batch is encoded.",
        "every stream of the batch fails with one that has no offsets left",
        """
        streammeta.client.writing.admission:
        - if offsets > INT64_MAX - stream.next_offset:
        + if False:
        """,
        Tested(_WRITER + "test_a_stream_without_offsets_left_fails_alone"),
    ),
    Mutant(
        "future-records-are-taken",
        "A batch with records from the future is appended.",
        "a producer that counts microseconds, and a topic that keeps everything",
        """
        streammeta.brokers.partition.log:
        - self._check_time(batch)
        """,
        Tested(_LOG + "test_records_from_the_future_are_refused_and_change_nothing"),
    ),
    Mutant(
        "future-records-block-retention",
        "A segment ages from the time of its newest record, however far ahead that is.",
        "records of the future that were taken before they were refused",
        """
        streammeta.brokers.partition.segments:
        - if 0 < newest_ms <= latest_ms:
        + if 0 < newest_ms:
        """,
        Tested(_LOG + "test_a_time_that_says_nothing_neither_blocks_nor_hastens_retention"),
    ),
    Mutant(
        "records-without-a-time-are-old",
        "A segment whose records have no time is older than any retention.",
        "acknowledged records are deleted with the next look",
        """
        streammeta.brokers.partition.segments:
        - if 0 < newest_ms <= latest_ms:
        + if newest_ms <= latest_ms:
        """,
        Tested(_LOG + "test_a_time_that_says_nothing_neither_blocks_nor_hastens_retention"),
    ),
    Mutant(
        "old-records-forget-their-producer",
        "A producer is idle since the time of its newest record, not since its last append.",
        "a retry of a copied record with its old time is appended twice",
        """
        streammeta.brokers.partition.state:
        - self.producers.record(batch, base_offset, now_ms)
        + self.producers.record(batch, base_offset)
        """,
        Tested(_LOG + "test_a_producer_of_old_records_is_not_forgotten"),
    ),
)
