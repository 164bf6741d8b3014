"""Mutants of replication: what is acknowledged, committed, cut and appended."""

from tests.mutants.mutant import Mutant, Simulated, Tested

REPLICATION = (
    Mutant(
        "earlier-epochs-committed-by-counting",
        "Batches of earlier epochs are committed as soon as a majority has them.",
        "Raft, figure 8; CCF (Howard et al., Smart Casual Verification, 2025)",
        """
        streammeta.controller.quorum.voters:
        - return candidate if candidate > epoch_start else None
        + return candidate
        """,
        Simulated("restless"),
    ),
    Mutant(
        "commit-at-epoch-start",
        "The high watermark may equal the start of the leader's epoch.",
        "KAFKA-12619",
        """
        streammeta.controller.quorum.voters:
        - return candidate if candidate > epoch_start else None
        + return candidate if candidate >= epoch_start else None
        """,
        Simulated("restless"),
    ),
    Mutant(
        "high-watermark-falls",
        "The high watermark follows the majority down as well as up.",
        "the family of KAFKA-16530",
        """
        streammeta.controller.quorum.replica:
        - if end_offset <= self.high_watermark:
        + if end_offset == self.high_watermark:
        """,
        Simulated("restless"),
    ),
    Mutant(
        "high-watermark-before-cut",
        "A follower takes the leader's high watermark before its own log is known to agree.",
        "the reason for Raft's min(leaderCommit, last new entry), figure 2",
        """
        streammeta.controller.quorum.following:
        + end = min(response.high_watermark, replica.log.end_offset)
        + replica.raise_high_watermark(EndOffset(end))
          replica.truncate(self._truncation_point(response.diverging))
        """,
        Simulated("restless"),
    ),
    Mutant(
        "committed-cut-by-late-answer",
        "Any Fetch answer is applied, however late, and cuts what has been committed since.",
        "KAFKA-12460; CCF (Howard et al., Smart Casual Verification, 2025)",
        """
        streammeta.controller.quorum.requests:
        - if waiting is None or waiting.request_id != header.request_id:
        -     return False
        - del self._pending[header.sender, kind]
        + self._pending.pop((header.sender, kind), None)
        streammeta.controller.quorum.replica:
        - if end_offset < self.high_watermark:
        + if end_offset < 0:
        """,
        Simulated("noisy", seeds=range(29, 229)),
    ),
    Mutant(
        "late-batches-appended",
        "Batches are appended without a look at where they belong.",
        "why KRaft keeps one Fetch in flight and checks the base offset",
        """
        streammeta.controller.quorum.requests:
        - if waiting is None or waiting.request_id != header.request_id:
        -     return False
        - del self._pending[header.sender, kind]
        + self._pending.pop((header.sender, kind), None)
        streammeta.controller.quorum.following:
        - if batch.base_offset != end or not batch.payloads:
        + if not batch.payloads:
        """,
        Simulated("noisy"),
    ),
    Mutant(
        "credit-before-check",
        "A Fetch is credited before its position is known to be in the leader's log.",
        "CCF counted NACKs and over-long ACKs (Howard et al., Smart Casual Verification, 2025)",
        """
        streammeta.controller.quorum.leading:
        + progress.end_offset = min(request.fetch_offset, replica.log.end_offset)
        + self.update_high_watermark()
          if self._needs_snapshot(request):
        """,
        Simulated("restless"),
    ),
    Mutant(
        "fetch-sent-before-flush",
        "A follower asks for what follows before what it has is flushed: an early ack.",
        "KAFKA-17332 is of this family",
        """
        streammeta.controller.quorum.replica:
        - if isinstance(message, messages.FetchRequest) and not (self.is_disk_full or is_ahead):
        + if False:
        """,
        Simulated("crashy"),
    ),
    Mutant(
        "leader-counts-unflushed",
        "The leader counts itself for what it has not flushed.",
        "etcd #14370: a single member lost acknowledged writes",
        """
        streammeta.controller.quorum.leading:
          if replica.is_voter:
        -     ends.append(replica.log.flushed_end)
        +     ends.append(replica.log.end_offset)
        """,
        Simulated("crashy"),
    ),
    Mutant(
        "one-flush-counts-for-all",
        "The end of any write counts as the end of all that were begun.",
        "a slip of pipelined appends; group commit makes it tempting",
        """
        streammeta.controller.quorum.log_view:
        - while self._unflushed and self._unflushed[0][0] <= token:
        + while self._unflushed:
        """,
        Tested(
            "tests/quorum/test_quorum_log_view.py"
            "::test_a_write_that_was_cut_does_not_vouch_for_what_replaced_it"
        ),
    ),
    Mutant(
        "flush-of-cut-batches-counts",
        "A write that ends after its batches were cut vouches for what replaced them.",
        "hazard of truncation with writes in flight",
        """
        streammeta.controller.quorum.log_view:
        - self._unflushed = deque((token, min(end, end_offset)) for token, end in self._unflushed)
        + self._unflushed = deque(self._unflushed)
        """,
        Tested(
            "tests/quorum/test_quorum_log_view.py"
            "::test_a_write_that_was_cut_does_not_vouch_for_what_replaced_it"
        ),
    ),
    Mutant(
        "diverging-log-kept",
        "The leader says its own end for any epoch, so diverging logs are not cut.",
        "the consistency check of Raft's AppendEntries (section 5.3)",
        """
        streammeta.controller.quorum.log_view:
        + return EpochEnd(epoch, self.end_offset)
          index = bisect_right(self._epochs, epoch) - 1
        """,
        Simulated("restless"),
    ),
    Mutant(
        "epoch-index-not-cut",
        "Cutting the log leaves the index of epochs as it was.",
        "a case that Kafka's log treats on its own",
        """
        streammeta.controller.quorum.log_view:
        - keep = bisect_left(self._starts, end_offset)
        - del self._epochs[keep:], self._starts[keep:]
        """,
        Simulated("restless", range(1000), is_rare=True),
    ),
    Mutant(
        "cut-without-own-epochs",
        "A follower cuts where the leader's epoch ends, without a look at its own epochs.",
        "KIP-101 and KIP-279, which cured lost and diverging logs in Kafka",
        """
        streammeta.controller.quorum.following:
        - ours = log.end_of_epoch(theirs.epoch)
        - if ours.epoch != theirs.epoch:
        -     return ours.end_offset
        - return min(ours.end_offset, theirs.end_offset)
        + return min(log.end_offset, theirs.end_offset)
        """,
        Tested(
            "tests/quorum/test_quorum_replication.py"
            "::test_a_diverging_log_is_cut_where_both_may_agree"
        ),
    ),
    Mutant(
        "promised-offset-taken",
        "A record of the quorum's own takes the offset that was promised to a client's record.",
        "found here by chaos; KAFKA-15213",
        """
        streammeta.controller.runtime.replication.core_loop:
        - for append in self._take_appends():
        + for append in self._take_appends() if not self._events else ():
        """,
        Tested(
            "tests/runtime/test_append_batching.py"
            "::test_a_voter_record_between_an_append_and_its_flush_shifts_nothing"
        ),
    ),
)
