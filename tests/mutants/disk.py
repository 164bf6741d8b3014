"""Mutants of the disk: flushes, torn tails, damage, full disks, and what a start trusts."""

from tests.mutants.mutant import Mutant, Simulated, Tested

DISK = (
    Mutant(
        "flush-left-out",
        "What is acknowledged was written, not flushed.",
        "NATS flushes every two minutes by default (Jepsen, NATS 2.12.1)",
        """
        streammeta.controller.journal.journal:
        - self._segments[-1].sync()
        """,
        Simulated("crashy"),
    ),
    Mutant(
        "failed-flush-tried-again",
        "A flush that failed is tried again, and the second success is believed.",
        "fsyncgate, PostgreSQL 2018",
        """
        streammeta.controller.journal.journal:
        - self._has_failed = True
        - self._segments[-1].sync()
        + try:
        +     self._segments[-1].sync()
        + except OSError:
        +     self._segments[-1].sync()
        """,
        Simulated("full", range(1000), is_rare=True),
    ),
    Mutant(
        "mark-ahead-of-flush",
        "The note of how far the log was flushed is written before the flush.",
        "an order that only a crash between the two shows",
        """
        streammeta.controller.journal.journal:
        + self._mark.advance(self.end_offset)
          self._segments[-1].sync()
        """,
        Simulated("crashy"),
    ),
    Mutant(
        "names-of-a-dead-process-trusted",
        "A start counts on files whose names the process before it had not made durable.",
        "found here by the simulator",
        """
        streammeta.controller.journal.journal:
        - files.sync_directory(directory)
        """,
        Tested(
            "tests/journal/test_journal_crash.py"
            "::test_what_a_killed_process_left_is_durable_before_it_counts"
        ),
    ),
    Mutant(
        "renamed-before-flush",
        "A file gets its name before its bytes are flushed, so a crash leaves it empty.",
        "KAFKA-15312",
        """
        streammeta.storage.durable_files:
        - file.sync()
        """,
        Simulated("crashy"),
    ),
    Mutant(
        "name-not-flushed",
        "The directory is not flushed after a rename, so a crash brings the old vote back.",
        "ALICE (Pillai et al., OSDI 2014) found it in many stores",
        """
        streammeta.storage.durable_files:
        - files.sync_directory(path.parent)
        """,
        Simulated("crashy"),
    ),
    Mutant(
        "damage-taken-for-torn-tail",
        "A bad batch below what was flushed is cut away as if it had never been acknowledged.",
        "NATS cut such files short and lost data (Jepsen, NATS 2.12.1)",
        """
        streammeta.controller.journal.recovery:
        - return self.mark.end_offset > end_offset or segment.vouches_beyond(end_offset)
        + return False
        """,
        Tested(
            "tests/journal/test_journal_damage.py"
            "::test_a_flipped_bit_below_the_mark_is_told_and_what_is_before_it_stays"
        ),
    ),
    Mutant(
        "torn-tail-kept",
        "What a crash left of a half-written batch stays behind the log's end.",
        "a classic of recovery by scanning",
        """
        streammeta.controller.journal.recovery:
        - if segment.file.size() > good_size:
        + if False:
        """,
        Tested("tests/journal/test_journal_damage.py::test_a_tail_torn_at_any_byte_is_cut"),
    ),
    Mutant(
        "room-left-in-a-full-segment",
        "A segment keeps the zeros behind its last batch when the next one begins.",
        "possible since batches are written over room",
        """
        streammeta.controller.journal.journal:
        - self._segments[-1].seal()
        + pass
        """,
        Tested("tests/journal/test_journal_room.py::test_the_last_segment_alone_has_room"),
    ),
    Mutant(
        "room-cut-by-a-dead-process-trusted",
        "Room that a killed process had cut off, unflushed, counts as gone.",
        "found here by the walk through all crashes",
        """
        streammeta.controller.journal.segment:
        - self.cut(self.size)
        + if self.file.size() > self.size:
        +     self.cut(self.size)
        """,
        Tested(
            "tests/journal/test_journal_crash.py"
            "::test_what_a_killed_process_left_is_durable_before_it_counts"
        ),
    ),
    Mutant(
        "checksum-not-compared",
        "A batch is read without a look at its checksum.",
        "KAFKA-14104",
        """
        streammeta.storage.segmented_log:
        - if google_crc32c.value(body) != self.body_checksum:
        + if False:
        """,
        Simulated("rotten"),
    ),
    Mutant(
        "checksum-without-place",
        "The checksum does not cover which log and offset a batch is of.",
        "misdirected writes (Bairavasundaram et al., FAST 2008)",
        """
        streammeta.storage.segmented_log:
        - checksum = google_crc32c.value(self.log_id + fields)
        + checksum = google_crc32c.value(fields)
        streammeta.storage.segmented_log:
        - if checksum != google_crc32c.value(self.log_id + fields):
        + if checksum != google_crc32c.value(fields):
        """,
        Tested(
            "tests/journal/test_journal_damage.py"
            "::test_a_batch_at_another_place_or_of_another_log_is_damage"
        ),
    ),
    Mutant(
        "half-batch-stays-when-full",
        "What fitted of a batch on a full disk is not taken back.",
        "half-written batches after ENOSPC",
        """
        streammeta.storage.segmented_log:
        - self.cut_tail()
        + self.size = self.file.size()
        """,
        Simulated("full", range(1000), is_rare=True),
    ),
    Mutant(
        "full-leader-hands-over-to-the-full",
        "A leader without room hands over though no majority has room for what comes next.",
        "found by trying: reads stopped until room was made",
        """
        streammeta.controller.quorum.membership:
        - if len(writable) < majority(len(replica.voters)):
        + if not writable:
        """,
        Tested(
            "tests/quorum/test_quorum_room.py"
            "::test_a_full_leader_hands_over_with_the_next_fetches_of_a_majority_with_room"
        ),
    ),
    Mutant(
        "state-waits-behind-batches",
        "A vote waits for room behind a batch that finds none, and no voter can be elected.",
        "found by trying: reads stopped until room was made",
        """
        streammeta.controller.runtime.persistence.quorum_disk:
        - work = self._write_last_state(work)
        """,
        Tested(
            "tests/journal/test_journal_reserve.py"
            "::test_a_state_overtakes_batches_that_wait_for_room_and_is_written_once"
        ),
    ),
    Mutant(
        "loop-writes-while-the-thread-does",
        "The loop flushes a batch while the thread has others to write that come before it.",
        "what two writers of one log come to",
        """
        streammeta.controller.runtime.persistence.flush_scheduling:
        - if self._at_thread or self._is_disk_full:
        + if self._is_disk_full:
        """,
        Simulated("crashy", seeds=range(30, 230)),
    ),
    Mutant(
        "loop-reports-before-its-flush",
        "What the loop flushes itself is acknowledged first: nothing else could see it meanwhile.",
        "a power failure could",
        """
        streammeta.controller.runtime.persistence.quorum_disk:
        + for item in work:
        +     self._on_report(events.WriteDone(item.token))
          began = time.monotonic()
          try:
        """,
        Tested(
            "tests/journal/test_journal_places.py"
            "::test_a_flush_of_the_loop_is_reported_when_it_is_durable_and_not_before"
        ),
    ),
    Mutant(
        "fetch-sent-with-the-state",
        "A state written ahead of batches lets the acknowledgement of those batches go too.",
        "a hazard of writing the quorum-state out of its turn",
        """
        streammeta.controller.runtime.replication.core_loop:
        - is_state_durable = not effect.vouches_for_log and effect.after <= self._state_token
        + is_state_durable = effect.after <= self._state_token
        """,
        Tested(
            "tests/runtime/test_outbox.py"
            "::test_a_state_ahead_of_its_turn_lets_no_acknowledgement_go"
        ),
    ),
    Mutant(
        "left-epoch-spoken-for",
        "What waits for a full disk is sent after a message of a later epoch has gone ahead of it.",
        "found here by the simulator",
        """
        streammeta.controller.runtime.replication.core_loop:
        - elif message.header.epoch < self._epoch:
        + elif message.header.epoch < 0:
        """,
        Tested(
            "tests/runtime/test_outbox.py"
            "::test_what_waits_while_a_later_epoch_is_spoken_for_is_dropped"
        ),
    ),
    Mutant(
        "reserve-not-used",
        "The reserve is kept even when a batch that an election needs finds no room.",
        "found by trying: no voter could be elected on full disks",
        """
        streammeta.controller.journal.journal:
        - if not self.reserve.release_for_log(error):
        + if True:
        """,
        Tested(
            "tests/journal/test_journal_reserve.py"
            "::test_on_a_full_disk_votes_and_a_leader_change_are_written"
        ),
    ),
    Mutant(
        "appends-that-no-majority-has-room-for",
        "A leader with room takes writes that cannot be committed, as the others' disks are full.",
        "found by trying: writes ran into their deadline",
        """
        streammeta.controller.quorum.leading:
        - replica.emit(events.FullVotersChanged(full))
        """,
        Tested(
            "tests/runtime/test_driver_full_disk.py"
            "::test_a_leader_alone_with_room_refuses_writes_at_once_and_holds_up_no_read"
        ),
    ),
    Mutant(
        "reads-wait-for-room",
        "A read waits for batches that wait for room on disks.",
        "found by trying: one read took nine seconds",
        """
        streammeta.controller.runtime.writer.controller:
        -     self._reads.fail_all(_ReadAgainError())
        +     self._reads.fail_all

          def on_writes_held_up(self) -> None:
        """,
        Tested(
            "tests/runtime/test_runtime_controller.py::"
            "test_reads_that_wait_when_disks_become_full_are_answered_from_what_is_committed"
        ),
    ),
    Mutant(
        "cut-not-announced",
        "A log is cut without lowering first what counts as flushed.",
        "a crash in the middle of a truncation then looks like damage",
        """
        streammeta.controller.journal.journal:
        - self._mark.begin_cut(end_offset)
        """,
        Tested("tests/journal/test_journal_crash.py::test_a_crash_leaves_the_old_state_or_the_new"),
    ),
    Mutant(
        "missing-vote-file-made-anew",
        "A missing quorum-state counts as one that has never voted.",
        "early KRaft cleared the file when it could not be read",
        """
        streammeta.controller.journal.state_files:
        - raise JournalDamagedError(path, 0, "the file and the vote in it are missing") from None
        + return QuorumState(Epoch(0), None, None)
        streammeta.controller.journal.recovery:
        - if last_epoch > self.state.epoch:
        + if False:
        """,
        Tested(
            "tests/journal/test_journal_recovery.py::test_a_missing_quorum_state_is_never_made_anew"
        ),
    ),
    Mutant(
        "old-vote-file-accepted",
        "A quorum-state older than the log is taken for what it is not.",
        "restored files and cloned disks; votes are forgotten",
        """
        streammeta.controller.quorum.core:
        - if last_epoch > state.epoch:
        + if False:
        """,
        Tested(
            "tests/quorum/test_quorum_election.py"
            "::test_a_log_newer_than_the_quorum_state_stops_the_process"
        ),
    ),
    Mutant(
        "lock-not-taken",
        "Two processes may write to one data directory.",
        "why Kafka and etcd lock theirs",
        """
        streammeta.storage.durable_files:
        - fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        + pass
        """,
        Tested("tests/journal/test_journal_directory.py::test_one_process_at_a_time"),
    ),
    Mutant(
        "damaged-voter-votes",
        "A voter that lost acknowledged batches to damage votes before they are back.",
        "NATS elected a damaged node and lost data (Jepsen, NATS 2.12.1)",
        """
        streammeta.controller.quorum.election:
        - if replica.lost is not None:
        + if False:
        streammeta.controller.quorum.replica:
        - if self.lost is not None or self.installing is not None:
        + if self.installing is not None:
        """,
        Simulated("rotten"),
    ),
    Mutant(
        "repaired-too-early",
        "A damaged voter votes again after its first Fetch.",
        "protocol-aware recovery (Alagappan et al., FAST 2018)",
        """
        streammeta.controller.quorum.following:
        - if has_committed and (replica.epoch > lost.epoch or log.flushed_end >= lost.end_offset):
        + if has_committed or lost is not None:
        """,
        Simulated("rotten", range(1000), is_rare=True),
    ),
    Mutant(
        "log-not-compared-committed",
        "A full follower that is told of a snapshot commits what it has flushed, compared or not.",
        "found here by the simulator",
        """
        streammeta.controller.quorum.following:
        - if response.snapshot_id is None:  # else the leader has not compared the logs
        + if True:  # else the leader has not compared the logs
        """,
        Tested(
            "tests/quorum/test_quorum_snapshots.py"
            "::test_with_a_full_disk_a_log_that_was_not_compared_is_not_committed"
        ),
    ),
    Mutant(
        "flushed-since-the-fetch-committed",
        "A full follower commits what it has flushed since the Fetch that the leader answers.",
        "a relative of the one above",
        """
        streammeta.controller.quorum.following:
        - known = min(role.fetch_offset, replica.log.flushed_end)
        + known = replica.log.flushed_end
        """,
        Tested(
            "tests/quorum/test_quorum_room.py"
            "::test_what_was_flushed_since_a_fetch_is_not_committed_by_its_answer"
        ),
    ),
    Mutant(
        "promise-by-mark-alone",
        "What damage cost is judged by the notes of flushes, which may be older than the last one.",
        "found here by the simulator",
        """
        streammeta.controller.journal.recovery:
        - ends = [header.end_offset for _, header in headers]
        + ends = [header.flushed_end for _, header in headers]
        """,
        Tested(
            "tests/journal/test_journal_damage.py"
            "::test_damage_is_told_with_an_outdated_mark_if_a_later_batch_vouches"
        ),
    ),
    Mutant(
        "promise-behind-bad-header-forgotten",
        "A segment whose header is damaged is not searched for what it had promised.",
        "found here by the simulator",
        """
        streammeta.controller.journal.recovery:
        - promised_end = max(promised_end, self._last_end_in(file, position))
        + if file.segment is not None:
        +     promised_end = max(promised_end, self._last_end_in(file, position))
        """,
        Tested(
            "tests/journal/test_journal_damage.py"
            "::test_batches_that_can_not_be_used_are_promises_all_the_same"
        ),
    ),
)
