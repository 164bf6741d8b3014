"""Mutants of snapshots: where the log begins, downloads, and what a snapshot holds."""

from tests.mutants.mutant import Mutant, Simulated, Tested

SNAPSHOTS = (
    Mutant(
        "epoch-before-start-forgotten",
        "A log that begins at a snapshot forgets the epoch of what was before.",
        "the boundary cases of KAFKA-12253",
        """
        streammeta.controller.quorum.log_view:
        - self.start_epoch = self.epoch_before(start_offset)
        streammeta.controller.quorum.log_view:
        - self.start_epoch = snapshot_id.epoch
        """,
        Simulated("snapshots"),
    ),
    Mutant(
        "log-start-not-compared",
        "A follower that ends where the log begins is served whatever its epoch there.",
        "the boundary cases of KAFKA-12253",
        """
        streammeta.controller.quorum.leading:
        - return request.fetch_offset < log.start_offset or request.last_epoch != log.start_epoch
        + return request.fetch_offset < log.start_offset
        """,
        Simulated("snapshots", range(1000), is_rare=True),
    ),
    Mutant(
        "chunks-of-two-files-mixed",
        "Chunks are put together although the file behind them has changed.",
        "a snapshot written twice under one id need not be the same bytes",
        """
        streammeta.controller.quorum.following:
        - return is_first or (response.total_bytes, response.file_digest) == (
        -     download.total_bytes,
        -     download.digest,
        - )
        + return is_first or bool(response.data)
        streammeta.controller.journal.snapshots:
        - if (download.size, download.digest) != (total_bytes, digest):
        + if False:
        """,
        Tested(
            "tests/quorum/test_quorum_snapshots.py"
            "::test_a_chunk_of_another_file_begins_everything_anew"
        ),
    ),
    Mutant(
        "download-looks-like-silence",
        "Chunks of a snapshot do not count as signs of life of the leader.",
        "a long download must not end in an election (KIP-630)",
        """
        streammeta.controller.quorum.following:
        - self._heard_from_leader(role, response.header)
        + role.next_fetch = replica.now
          if download.position == download.total_bytes:
        """,
        Tested(
            "tests/quorum/test_quorum_snapshots.py"
            "::test_each_chunk_keeps_the_follower_from_campaigning"
        ),
    ),
    Mutant(
        "downloads-do-not-count-as-fetches",
        "A leader whose voters download snapshots believes that they are gone.",
        "KAFKA-15489 left them out at first",
        """
        streammeta.controller.quorum.leading:
        - self._heard_from(role, request)
        """,
        Tested(
            "tests/quorum/test_quorum_snapshots.py"
            "::test_a_fetch_that_gets_a_snapshot_acknowledges_nothing_but_life"
        ),
    ),
    Mutant(
        "voters-missing-from-snapshot",
        "The voters that a snapshot names are not taken over at start.",
        "KIP-853 writes them into every snapshot",
        """
        streammeta.controller.quorum.replica:
        - recovered.snapshot_voters or self.config.bootstrap_voters,
        + self.config.bootstrap_voters,
        """,
        Simulated("snapshots"),
    ),
    Mutant(
        "voter-history-trimmed-too-far",
        "Trimming the log forgets the voters named by what it keeps.",
        "the history of voter sets in KIP-853",
        """
        streammeta.controller.quorum.voters:
        - drop = bisect_right(self._ends, start_offset) - 1
        + drop = len(self._ends) - 1
        """,
        Simulated("snapshots", range(1000), is_rare=True),
    ),
    Mutant(
        "high-watermark-below-snapshot",
        "A replica that starts from a snapshot takes the log's start for what is committed.",
        "KAFKA-14618, off by one at the end of a snapshot, is of this family",
        """
        streammeta.controller.quorum.replica:
        - self.snapshots[-1].end_offset if self.snapshots else self.log.start_offset
        + self.log.start_offset
        """,
        Simulated("snapshots"),
    ),
    Mutant(
        "log-trimmed-past-snapshot",
        "Trimming removes segments that no snapshot holds.",
        "KAFKA-14238",
        """
        streammeta.controller.journal.journal:
        - while len(self._segments) > 1 and self._segments[1].base_offset <= start_offset:
        + while len(self._segments) > 1:
        """,
        Simulated("snapshots", range(1000), is_rare=True),
    ),
    Mutant(
        "snapshot-published-before-flush",
        "A downloaded snapshot gets its name before its bytes are flushed.",
        "KAFKA-15312",
        """
        streammeta.controller.journal.snapshots:
        - download.seal()
        """,
        Simulated("snapshots", range(1000), is_rare=True),
    ),
    Mutant(
        "log-gone-before-snapshot",
        "A download replaces the log before it is known to be whole.",
        "the order of KIP-630: check, make durable, then cut",
        """
        streammeta.controller.journal.journal:
        + self._restart_log(snapshot_id)
          voters = self.snapshots.install(snapshot_id, total_bytes, digest)
        """,
        Tested(
            "tests/journal/test_journal_snapshots.py::test_only_what_was_announced_is_installed"
        ),
    ),
    Mutant(
        "delivery-skips-one",
        "After a snapshot is loaded the first record behind it is not replayed.",
        "KAFKA-14618",
        """
        streammeta.controller.runtime.replication.delivery:
        - self.end_offset = snapshot_id.end_offset
        + self.end_offset = EndOffset(snapshot_id.end_offset + 1)
        """,
        Simulated("snapshots"),
    ),
    Mutant(
        "stale-keys-survive-load",
        "Loading a snapshot leaves keys that were deleted before it was made.",
        "KAFKA-14894",
        """
        streammeta.controller.runtime.writer.controller:
        + stale = dict(self._metadata._kvs.snapshot())
        + present = dict(loaded.cluster_metadata._kvs.snapshot())
        + loaded.cluster_metadata._kvs.load({**stale, **present})
          self._metadata = loaded.cluster_metadata
        """,
        Tested(
            "tests/runtime/test_runtime_snapshots.py"
            "::test_a_loaded_snapshot_replaces_everything_stale_keys_too"
        ),
    ),
    Mutant(
        "epoch-at-start-not-indexed",
        "Batches behind a trimmed start that go on with its epoch are left out of the index.",
        "found here by the simulator",
        """
        streammeta.controller.quorum.log_view:
        - if not self._epochs or batch.epoch > self.last_epoch:
        + if batch.epoch > self.last_epoch:
        """,
        Simulated("snapshots", seeds=range(75, 275)),
    ),
)
