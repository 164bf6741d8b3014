"""Mutants of write-ahead logs in the bucket: order, fences, deletion, recovery."""

from tests.mutants.mutant import Mutant, Tested

_LOG = "tests/broker_client/test_object_log.py"
_FAILOVER = "tests/broker_client/test_object_log_failover.py"
_FENCES = "tests/broker_client/test_object_log_fences.py"
_FORMAT = "tests/storage/test_storage_object_log.py"

OBJECT_LOGS = (
    Mutant(
        "slots-acknowledged-out-of-order",
        "A slot is acknowledged though one before it is not stored: a recovery ends before it.",
        "AutoMQ's object WAL completes its uploads in order, for this reason",
        """
        streammeta.client.wal.bucket.slot_queue:
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
        streammeta.client.wal.bucket.slot_queue:
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
        streammeta.client.wal.bucket.reading:
        - _log.info("write-ahead log %s has a seal, slot %d", name.prefix, needed.end)
        + return SealedLog(name, needed.first, needed.end)
        """,
        Tested(f"{_LOG}::test_a_seal_in_the_place_of_a_deleted_slot_is_no_seal"),
    ),
    Mutant(
        "taken-slot-counts-as-stored",
        "A slot that another created counts as stored: a zombie goes on acknowledging.",
        "S3 clients that take 412 for a repeat of their own put",
        """
        streammeta.client.wal.bucket.log:
        - self._end(LogSealedError(upload.key, await self._describe_sealer(upload.key)))
        + self._complete(upload)
        """,
        Tested(f"{_LOG}::test_a_sealed_log_acknowledges_nothing_more"),
    ),
    Mutant(
        "hole-below-what-was-stored-is-the-end",
        "A slot that was lost passes for the end of the log: what is behind it is dropped.",
        "AutoMQ's object WAL recovers up to the first gap",
        """
        streammeta.client.wal.bucket.reading:
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
        streammeta.client.wal.bucket.reading:
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
        streammeta.client.wal.bucket.bucket_slots:
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
        streammeta.client.wal.bucket.failover:
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
        streammeta.client.wal.bucket.failover:
        - return record.epoch == stream.epoch and record.end_offset <= stream.upload_end
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
        streammeta.client.wal.bucket.failover:
        - await departed.list_pending()
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
    Mutant(
        "claim-deleted-with-past-slots",
        "The claim is deleted when the log is closed: a second process may use its epoch.",
        "slot 0 was deleted with the first 64 past slots; an acknowledged record was lost",
        """
        streammeta.client.wal.bucket.log:
        - self._deleted_below = max(self._deleted_below, below)
        + self._deleted_below = below
        """,
        Tested(f"{_FENCES}::test_the_epoch_of_a_log_that_was_closed_is_refused"),
    ),
    Mutant(
        "claim-is-a-past-slot",
        "The claim is deleted with the first past slots while its process lives.",
        "two processes of one node epoch wrote one log",
        """
        streammeta.client.wal.bucket.log:
        - self._deleted_below = 1
        + self._deleted_below = 0
        """,
        Tested(
            f"{_FENCES}::test_an_epoch_is_refused_though_the_first_slots_of_its_log_were_deleted"
        ),
    ),
    Mutant(
        "epoch-of-a-recovered-log-used-again",
        "A process writes into a log that has the mark of a recovered one: no one reads it.",
        "a node that restarts with a fixed epoch after a failover",
        """
        streammeta.client.wal.bucket.log:
        - if not is_fresh or await slots.get(name.recovered_key) is not None:
        + if not is_fresh:
        """,
        Tested(
            f"{_FENCES}::test_the_epoch_of_a_recovered_log_is_refused_though_no_listing_shows_its_mark"
        ),
    ),
    Mutant(
        "claim-is-not-repeated",
        "A claim whose answer was lost makes its own process fail.",
        "a store that closes the connection after the put",
        """
        streammeta.client.wal.bucket.log:
        - for attempt in range(reading.DOUBTS):
        + for attempt in range(0):
        """,
        Tested(f"{_FENCES}::test_a_claim_whose_answer_was_lost_is_repeated"),
    ),
    Mutant(
        "stalled-process-acknowledges",
        "A process that stalled while its seal was swept acknowledges what no one will read.",
        "a clock that was eight days ahead swept a seal of some seconds",
        """
        streammeta.client.wal.bucket.log:
        - if self._lease.covers(self._clock()) or await self._has_claim():
        + if True:
        """,
        Tested(
            f"{_FENCES}::test_a_process_that_stalled_while_its_seal_was_swept_acknowledges_nothing"
        ),
    ),
    Mutant(
        "lease-from-the-end-of-a-put",
        "A repeated put renews the lease from its last attempt, though an earlier one did it.",
        "leases that count from the answer, not from the request",
        """
        streammeta.client.wal.bucket.ack_lease:
        - self._started.setdefault(sequence, now)
        + self._started[sequence] = now
        """,
        Tested(
            f"{_FENCES}::test_a_lease_counts_from_the_start_of_the_last_slot_without_a_hole_before_it"
        ),
    ),
    Mutant(
        "slot-after-a-hole-renews-the-lease",
        "A slot that was stored after one that is missing proves that there is no seal.",
        "parallel uploads beside a seal",
        """
        streammeta.client.wal.bucket.ack_lease:
        - for sequence in [at for at in self._started if at < durable_below]:
        + for sequence in list(self._started):
        """,
        Tested(
            f"{_FENCES}::test_a_lease_counts_from_the_start_of_the_last_slot_without_a_hole_before_it"
        ),
    ),
    Mutant(
        "claim-of-another-is-a-proof",
        "A process takes the claim of a later process with its epoch for its own.",
        "fences that check that an object exists, and not whose it is",
        """
        streammeta.client.wal.bucket.log:
        - decode_slot(data, key, self._queue.log.namespace).log_id == self._queue.log_id
        + decode_slot(data, key, self._queue.log.namespace).log_id is not None
        """,
        Tested(f"{_FENCES}::test_a_claim_of_another_process_is_no_proof"),
    ),
    Mutant(
        "sweep-at-the-start",
        "A process sweeps with one look at the bucket, by times that may be weeks off.",
        "a clock that was eight days ahead swept a seal of some seconds",
        """
        streammeta.client.wal.bucket.sweeping:
        - if before is None or before.recovered_ms is None or log.recovered_ms is None:
        + if log.recovered_ms is None:
        """,
        Tested(f"{_FENCES}::test_a_sweep_needs_two_looks_and_the_store_s_own_times"),
    ),
    Mutant(
        "newest-log-swept",
        "A process sweeps logs as new as its own: their epochs may be used again.",
        "retention that looks at the age alone",
        """
        streammeta.client.wal.bucket.sweeping:
        - if epoch >= own_epoch or log is None:
        + if log is None:
        """,
        Tested(f"{_FENCES}::test_no_log_behind_one_that_is_needed_and_not_the_newest_is_swept"),
    ),
    Mutant(
        "seal-swept-before-its-claim",
        "A sweep removes seals while the claim still says that none was removed.",
        "the order of deletion in a first design of this sweep",
        """
        streammeta.client.wal.bucket.sweeping:
        - await _delete(slots, claims)
        - await _delete(slots, others)
        + await _delete(slots, others)
        + await _delete(slots, claims)
        """,
        Tested(f"{_FENCES}::test_a_sweep_removes_the_claim_before_a_seal_and_leaves_one_mark"),
    ),
    Mutant(
        "swept-mark-left-out",
        "A slot that lands after the sweep of its log stops all later starts of the node.",
        "two logs that could not be opened again, found by hostile runs with faulty listings",
        """
        streammeta.client.wal.bucket.reading:
        - log.is_swept = epoch <= swept_to
        + log.is_swept = False
        """,
        Tested(f"{_FENCES}::test_a_slot_that_comes_after_the_sweep_is_no_damage"),
    ),
    Mutant(
        "late-seal-ends-a-log",
        "A seal in the place of a deleted slot ends the reading: all later slots are dropped.",
        "a recoverer with an old listing beside a process that goes on",
        """
        streammeta.client.wal.bucket.reading:
        - if needed.end != sealed.end:
        + if False:
        """,
        Tested(f"{_FENCES}::test_a_seal_in_the_place_of_a_deleted_slot_ends_no_reading"),
    ),
    Mutant(
        "unlisted-slot-is-missing",
        "A slot that a listing leaves out passes for damage.",
        "listings that lag behind puts",
        """
        streammeta.client.wal.bucket.reading:
        - slot = await _slot(slots, name, end)
        - if slot is None:
        + slot = None
        + if slot is None:
        """,
        Tested(f"{_FENCES}::test_a_slot_that_a_listing_leaves_out_is_neither_damage_nor_the_end"),
    ),
    Mutant(
        "unlisted-mark-is-missing",
        "A recovered log passes for a damaged one while a listing leaves out its mark.",
        "listings that lag behind puts",
        """
        streammeta.client.wal.bucket.reading:
        - if found.is_recovered or await slots.get(name.recovered_key) is not None:
        + if found.is_recovered:
        """,
        Tested(f"{_FENCES}::test_a_mark_that_a_listing_leaves_out_is_found"),
    ),
    Mutant(
        "listing-without-the-own-claim-counts",
        "A listing that is older than the process hides the log of the process before it.",
        "listings that lag behind puts",
        """
        streammeta.client.wal.bucket.log:
        - if name.node_epoch in found and 0 in found[name.node_epoch].sequences:
        + if name.node_epoch in found or not found.setdefault(
        +     name.node_epoch, FoundLog(name, [0])
        + ).is_recovered:
        """,
        Tested(f"{_FENCES}::test_a_listing_without_the_own_claim_is_repeated"),
    ),
    Mutant(
        "settled-before-its-slot-is-kept",
        "Records that are committed before they have a slot keep that slot needed for ever.",
        "found by simulation: a closed log asked for a slot that was deleted, at each later start",
        """
        streammeta.client.wal.bucket.slot_queue:
        - # The group's records may have been committed before it got its slot.
        - self._forget_settled()
        + pass
        """,
        Tested(f"{_LOG}::test_records_that_are_settled_before_they_have_a_slot_are_kept_by_none"),
    ),
    Mutant(
        "seal-of-a-closed-log-asks-for-a-slot",
        "A log that its own process closed is damaged for good if its seal names a deleted slot.",
        "seals of versions that kept a settled slot",
        """
        streammeta.client.wal.bucket.reading:
        - own = Sealer(name.node_id, name.node_epoch)
        + own = Sealer(name.node_id, -1)
        """,
        Tested(f"{_LOG}::test_a_log_that_its_own_process_closed_needs_no_slot"),
    ),
)
