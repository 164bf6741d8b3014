"""Mutants of write-ahead logs in the bucket: order, fences, deletion, recovery."""

from tests.mutants.mutant import Mutant, Tested

_LOG = "tests/broker_client/test_object_log.py"
_FAILOVER = "tests/broker_client/test_object_log_failover.py"
_FORMAT = "tests/storage/test_storage_object_log.py"

OBJECT_LOGS = (
    Mutant(
        "slots-acknowledged-out-of-order",
        "A slot is acknowledged though one before it is not stored: a recovery ends before it.",
        "AutoMQ's object WAL completes its uploads in order, for this reason",
        """
        streammeta.client.object_log.slot_queue:
        - while self._placed and self._placed[0].is_stored:
        + while self._placed:
        """,
        Tested(f"{_LOG}::test_a_slot_is_acknowledged_only_when_all_before_it_are_stored"),
    ),
    Mutant(
        "slot-under-way-is-past",
        "A slot whose records are settled is deleted while it is on its way, and with it a seal.",
        "a seal under the key of a slot that its process takes for its own",
        """
        streammeta.client.object_log.slot_queue:
        - return min(first, self._durable_below)
        + return first
        """,
        Tested(f"{_LOG}::test_no_slot_under_way_is_past_though_its_records_are_settled"),
    ),
    Mutant(
        "seal-not-looked-at-again",
        "A seal that was created counts, though the process had stored and deleted that slot.",
        "found by the simulator, seed 1435, in the first version of this log",
        """
        streammeta.client.object_log.reading:
        - _log.info("write-ahead log %s has a seal, slot %d", name.prefix, end)
        + return SealedLog(name, first, end)
        """,
        Tested(f"{_LOG}::test_a_seal_in_the_place_of_a_deleted_slot_is_no_seal"),
    ),
    Mutant(
        "taken-slot-counts-as-stored",
        "A slot that another created counts as stored: a zombie goes on acknowledging.",
        "S3 clients that take 412 for a repeat of their own put",
        """
        streammeta.client.object_log.log:
        - self._end(LogSealedError(upload.key, await self._sealer_of(upload.key)))
        + self._stored(upload)
        """,
        Tested(f"{_LOG}::test_a_sealed_log_acknowledges_nothing_more"),
    ),
    Mutant(
        "hole-below-what-was-stored-is-the-end",
        "A slot that was lost passes for the end of the log: what is behind it is dropped.",
        "AutoMQ's object WAL recovers up to the first gap",
        """
        streammeta.client.object_log.reading:
        - if end < known:
        + if False:
        """,
        Tested(f"{_LOG}::test_a_hole_below_what_was_stored_is_damage_and_seals_nothing"),
    ),
    Mutant(
        "seals-discarded-with-their-log",
        "The seal goes with the log: its process, if it lives, goes on behind it.",
        "AutoMQ's reservation object stays when the WAL is reset",
        """
        streammeta.client.object_log.reading:
        - await delete_slots(slots, name, found.without_seals)
        + await delete_slots(slots, name, found.sequences)
        """,
        Tested(f"{_LOG}::test_a_discarded_log_keeps_its_seals_and_fences_its_process_still"),
    ),
    Mutant(
        "lost-answer-is-a-fence",
        "A slot that was created by an attempt without an answer passes for another's.",
        "conditional puts that are repeated by the store's client",
        """
        streammeta.client.object_log.bucket_slots:
        - return store.get_range(key) == data
        + return False
        """,
        Tested(f"{_LOG}::test_a_lost_answer_is_no_fence"),
    ),
    Mutant(
        "refused-upload-passes",
        "A failover whose upload was refused closes the streams and discards the log.",
        "AutoMQ's failover repeats it with growing pauses",
        """
        streammeta.client.object_log.failover:
        - return not wanted or await self._departed.upload(wanted)
        + return not wanted or await self._departed.upload(wanted) or True
        """,
        Tested(f"{_FAILOVER}::test_after_a_refused_upload_everything_is_judged_anew"),
    ),
    Mutant(
        "recovered-beyond-a-fast-close",
        "Records behind the end that a stream was closed with are uploaded.",
        "AutoMQ's failover recovers fast-closed streams up to their sealed end",
        """
        streammeta.client.object_log.failover:
        - return owed_to is None or record.end_offset <= owed_to
        + return True
        """,
        Tested(
            f"{_FAILOVER}::test_a_stream_closed_before_its_last_upload_is_recovered_up_to_its_end"
        ),
    ),
    Mutant(
        "log-sealed-before-its-node-is-fenced",
        "A recoverer that is not assigned any more ends the log of a broker that lives.",
        "the order of steps in a first design of this failover",
        """
        streammeta.client.object_log.failover:
        - await departed.owed()
        - names = [log.name for epoch, log in found.items() if epoch < node.node_epoch]
        + names = [log.name for epoch, log in found.items() if epoch < node.node_epoch]
        """,
        Tested(f"{_FAILOVER}::test_who_is_not_assigned_seals_nothing"),
    ),
    Mutant(
        "body-of-a-slot-not-checked",
        "Records whose bytes have changed in the bucket are committed.",
        "object stores that return damaged bytes",
        """
        streammeta.storage.object_log.slot:
        - if google_crc32c.value(body) != body_crc:
        + if False:
        """,
        Tested(f"{_FORMAT}::test_no_changed_bit_and_no_cut_passes"),
    ),
)
