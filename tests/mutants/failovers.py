"""Mutants of failovers and of records set aside: what a dead broker acknowledged, and its log."""

from tests.mutants.mutant import Mutant, Tested

_DEPARTED = "tests/broker_client/test_departed_node.py"
_FAILOVER = "tests/broker_client/test_object_log_failover.py"
_WORKER = "tests/broker_client/test_failover_worker.py"
_OBJECT_LOG = "tests/broker_client/test_object_log.py"
_RECOVERY = "tests/broker_client/test_wal_recovery.py"
_DISK_LOG = "tests/broker_client/test_wal_disk_log.py"

FAILOVERS = (
    Mutant(
        "partly-refused-upload-is-done",
        "An upload of which some streams were refused counts as done; the log is discarded.",
        "a commit that accepts its valid rows answers without an error of the whole",
        """
        streammeta.client.wal.bucket.departed_node:
        - return verdicts == {common_pb2.ERROR_CODE_NONE}
        + return common_pb2.ERROR_CODE_NONE in verdicts
        """,
        Tested(f"{_DEPARTED}::test_an_upload_of_which_some_were_refused_does_not_count_as_done"),
    ),
    Mutant(
        "upload-judged-by-its-first-stream",
        "An upload counts by the verdict of its first stream alone.",
        "code that was written for commits of one stream",
        """
        streammeta.client.wal.bucket.departed_node:
        - return verdicts == {common_pb2.ERROR_CODE_NONE}
        + return next(iter(commit.verdict(answer).values())) == common_pb2.ERROR_CODE_NONE
        """,
        Tested(f"{_DEPARTED}::test_an_upload_of_which_some_were_refused_does_not_count_as_done"),
    ),
    Mutant(
        "refusal-of-the-node-is-an-attempt",
        "A recoverer that a newer process has replaced judges and uploads again and again.",
        "one answer for refused rows and for a refused caller",
        """
        streammeta.client.wal.bucket.departed_node:
        - for code in verdicts & set(_NODE_REJECTED):
        + for code in ():
        """,
        Tested(
            f"{_DEPARTED}::test_a_newer_process_of_the_node_ends_the_recovery_and_not_an_attempt"
        ),
    ),
    Mutant(
        "refused-closing-is-done",
        "A closing that was refused counts as done, and the log is discarded.",
        "errors of single items in an answer that is fine as a whole",
        """
        streammeta.client.wal.bucket.departed_node:
        - if code not in _NO_LONGER_OWNED:
        + if code not in (*_NO_LONGER_OWNED, *_NODE_REJECTED):
        """,
        Tested(
            f"{_DEPARTED}::test_what_is_another_s_by_now_counts_as_closed_and_nothing_else_does"
        ),
    ),
    Mutant(
        "node-fenced-before-the-bucket-is-known",
        "A recoverer with the wrong bucket fences a node, finds no log, and closes its streams.",
        "a broker that was configured for another environment",
        """
        streammeta.client.wal.bucket.departed_node:
        - await self._bucket.require()
        """,
        Tested(f"{_DEPARTED}::test_a_bucket_of_another_cluster_fences_nobody"),
    ),
    Mutant(
        "log-discarded-before-streams-are-closed",
        "The log of a departed node is discarded though its streams could not be closed.",
        "clean-up in the wrong order",
        """
        streammeta.client.wal.bucket.failover:
        - await departed.close(streams)
        - report.closed_streams = len(streams)
          for log in sealed:
              await discard_log(slots, log.name, me)
        + await departed.close(streams)
        + report.closed_streams = len(streams)
        """,
        Tested(f"{_FAILOVER}::test_a_log_stays_until_the_streams_of_its_node_are_closed"),
    ),
    Mutant(
        "doubts-are-equality",
        "Offsets that another process wrote pass for the record that was acknowledged.",
        "recovery by offsets alone",
        """
        streammeta.client.wal.bucket.failover:
        - self._comparison.note(record, is_stored=is_stored)
        + self._comparison.note(record, is_stored=True)
        """,
        Tested(
            f"{_FAILOVER}::test_doubtful_records_count_as_committed_only_if_the_stream_holds_them"
        ),
    ),
    Mutant(
        "doubts-are-not-settled",
        "Records that an earlier recovery stored are set aside as if they were lost.",
        "recovery by epochs alone",
        """
        streammeta.client.wal.bucket.failover:
        - if self._plan.is_doubtful(record):
        + if False:
        """,
        Tested(
            f"{_FAILOVER}::test_doubtful_records_count_as_committed_only_if_the_stream_holds_them"
        ),
    ),
    Mutant(
        "older-epoch-continues-a-stream",
        "A record of an older epoch takes the offset of a newer one, which is set aside.",
        "a log that several epochs of a stream were written into",
        """
        streammeta.client.wal.bucket.failover:
        - note_newest(self._newest, record)
        + pass
        """,
        Tested(
            f"{_FAILOVER}"
            "::test_a_record_of_an_older_epoch_does_not_continue_a_stream_with_newer_ones"
        ),
    ),
    Mutant(
        "failover-in-one-part",
        "A failover holds all records of the log in memory before it uploads.",
        "logs of several GiB",
        """
        streammeta.client.wal.bucket.failover:
        - return self._bytes >= self._chunk_bytes or len(self._wanted) >= _CHUNK_STREAMS
        + return len(self._wanted) >= _CHUNK_STREAMS
        """,
        Tested(f"{_FAILOVER}::test_a_large_log_is_uploaded_in_several_parts"),
    ),
    Mutant(
        "one-failover-ends-the-worker",
        "A node that can't be recovered keeps every other node from being recovered.",
        "an exception that no handler expects",
        """
        streammeta.client.wal.bucket.failover:
        - except Exception:  # noqa: BLE001 - it must not stop the failover of other nodes
        + except OSError:
        """,
        Tested(
            f"{_WORKER}::test_a_node_that_can_not_be_recovered_holds_up_no_other_and_is_tried_again"
        ),
    ),
    Mutant(
        "node-recovered-without-its-log",
        "Streams of a node whose log is on its disk are closed without the records in it.",
        "recoverers that do not look at the kind of log",
        """
        streammeta.client.wal.bucket.failover:
        - if recovery.wal_config == WAL_CONFIG:
        + if recovery.node_id:
        """,
        Tested(f"{_WORKER}::test_a_node_without_a_log_in_the_bucket_is_left_alone"),
    ),
    Mutant(
        "aside-key-by-count",
        "Records set aside in the bucket replace others that are as many.",
        "names made of numbers that repeat",
        """
        streammeta.client.wal.bucket.setting_aside:
        - token = hashlib.sha256(body).hexdigest()[:32]
        + token = hashlib.sha256(b"%d" % len(encoded)).hexdigest()[:32]
        """,
        Tested(f"{_OBJECT_LOG}::test_no_records_set_aside_replace_others"),
    ),
    Mutant(
        "aside-key-by-first-record",
        "Records set aside in the bucket replace others that begin alike.",
        "names made of a position",
        """
        streammeta.client.wal.bucket.setting_aside:
        - token = hashlib.sha256(body).hexdigest()[:32]
        + token = hashlib.sha256(encoded[0]).hexdigest()[:32]
        """,
        Tested(f"{_OBJECT_LOG}::test_no_records_set_aside_replace_others"),
    ),
    Mutant(
        "aside-file-of-one-name",
        "The second records that a process sets aside replace the first.",
        "names made of the trimmed end alone",
        """
        streammeta.client.wal.disk.set_aside:
        - return directory / f"{trimmed:020d}-{number}.aside"
        + return directory / f"{trimmed:020d}-0.aside"
        """,
        Tested(f"{_DISK_LOG}::test_no_records_set_aside_replace_others"),
    ),
    Mutant(
        "aside-file-by-number-alone",
        "The next process' records that are set aside replace those of the one before.",
        "numbers that begin again with every start",
        """
        streammeta.client.wal.disk.set_aside:
        - return directory / f"{trimmed:020d}-{number}.aside"
        + return directory / f"{0:020d}-{number}.aside"
        """,
        Tested(f"{_DISK_LOG}::test_no_records_set_aside_replace_others"),
    ),
    Mutant(
        "start-over-tried-once",
        "A log that had no room to start over breaks at the next append, though there is room.",
        "found by a test: a request that is dropped with the failure of its first attempt",
        """
        streammeta.client.wal.disk.log:
        - if self._start_over_at is None:
        + if False:
        """,
        Tested(
            "tests/broker_client/test_wal_log.py"
            "::test_a_log_heals_though_its_state_had_no_room_when_it_was_to_start_over"
        ),
    ),
    Mutant(
        "leftovers-of-a-discarded-log",
        "Slots that a discarding could not delete stay in the bucket for ever.",
        "clean-up that is tried once",
        """
        streammeta.client.wal.bucket.log:
        - await delete_leftovers(slots, (log for epoch, log in found.items() if epoch < max(found)))
        """,
        Tested(
            f"{_OBJECT_LOG}::test_what_a_discarding_left_goes_at_the_next_start_but_for_the_seal"
        ),
    ),
    Mutant(
        "leftovers-with-their-seal",
        "The seal goes with the rest of a recovered log, and its process acknowledges again.",
        "clean-up of all that a listing shows",
        """
        streammeta.client.wal.bucket.reading:
          if log.is_recovered:
        -     await delete_slots(slots, log.name, log.without_seals)
        +     await delete_slots(slots, log.name, log.sequences)
        """,
        Tested(
            f"{_OBJECT_LOG}::test_what_a_discarding_left_goes_at_the_next_start_but_for_the_seal"
        ),
    ),
    Mutant(
        "restart-continues-an-older-epoch",
        "A restarted broker uploads records of an older epoch in the place of newer ones.",
        "a log that several epochs of a stream were written into",
        """
        streammeta.client.wal.disk.recovery:
        - note_newest(newest, record)
          if held.get(record.stream_id) != record.epoch:
        """,
        Tested(f"{_RECOVERY}::test_a_record_of_an_older_epoch_takes_no_offset_of_a_newer_one"),
    ),
    Mutant(
        "newer-epoch-continued",
        "Records of an epoch that the node does not hold yet continue its stream.",
        "a comparison of epochs for equality alone",
        """
        streammeta.client.wal.disk.recovery:
        - if held is None or held.epoch < record.epoch:
        + if held is None:
        """,
        Tested(f"{_RECOVERY}::test_a_record_of_a_newer_epoch_than_the_held_one_continues_nothing"),
    ),
)
