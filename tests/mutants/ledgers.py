"""Mutants of managed ledgers: lists, reads, automatic offload; and of other shapes side by side."""

from tests.mutants.mutant import Mutant, Tested

_CHANGES = "tests/brokers/test_pulsar_list_changes.py"
_POLICIES = "tests/brokers/test_pulsar_policies.py"
_AUTOMATIC = "tests/brokers/test_pulsar_automatic_offload.py"
_SIDE_BY_SIDE = "tests/brokers/test_rocketmq_side_by_side.py"
_READS = "tests/brokers/test_pulsar_block_reads.py"

LEDGERS = (
    Mutant(
        "fenced-owner-takes-its-successors-topic",
        "A topic that was opened again is never offloaded.",
        "removal by name of what may be another's by then",
        """
        streammeta.brokers.pulsar.automatic_offload:
        - if self._topics.get((topic.namespace, topic.name)) is topic:
        + if True:
              del self._topics[topic.namespace, topic.name]
        """,
        Tested(
            f"{_AUTOMATIC}"
            "::test_a_former_owner_that_is_fenced_late_takes_no_topic_from_its_successor"
        ),
    ),
    # ---- the list ----
    Mutant(
        "list-saved-without-a-turn",
        "A trim beside an offload names a version that is old, and the owner fences itself.",
        "a version that is read before an await, without a lock",
        """
        streammeta.brokers.pulsar.ledger_list:
        - async with self._changing:
        + if True:
              if self.is_fenced:
        """,
        Tested(f"{_CHANGES}::test_one_owner_never_fences_itself"),
    ),
    Mutant(
        "lost-answer-fences",
        "An owner whose save took effect unheard is fenced by its own list.",
        "a version that is believed after an unknown outcome",
        """
        streammeta.brokers.pulsar.ledger_list:
        - if self._unsettled is not None:
        + if False:
              await self._settle(self._unsettled)
        """,
        Tested(f"{_CHANGES}::test_a_save_whose_answer_was_lost_does_not_fence_its_owner"),
    ),
    Mutant(
        "any-list-is-the-own",
        "After a lost answer the list of another owner is taken over and changed.",
        "an outcome that is settled by the version alone",
        """
        streammeta.brokers.pulsar.ledger_list:
        - if found != attempted:
        + if False:
              raise self._fence(f"list has version {version}, expected {self._version}")
        """,
        Tested(f"{_CHANGES}::test_a_lost_answer_hides_no_other_owner"),
    ),
    Mutant(
        "earlier-copy-deleted-unproven",
        "A former owner deletes a copy that the stored list calls whole.",
        "deletion by a list that is not compared with the store",
        """
        streammeta.brokers.pulsar.ledger_list:
        - if not await self._set_context(ledger_id, _unless_complete):
        + if info.is_complete:
              return None
        """,
        Tested(f"{_CHANGES}::test_a_copy_that_the_stored_list_calls_whole_is_not_deleted"),
    ),
    Mutant(
        "automatic-offload-refused",
        "A policy is not carried out while an operator offloads by hand.",
        "one rule for calls of an operator and of a loop",
        """
        streammeta.brokers.pulsar.ledger_list:
        - async with self._offloading:
        + self._refuse_during_an_offload()
        + if True:
              await self._offload_all(due_ledgers(self.ledgers[:-1], policy, self.now_ms()))
        """,
        Tested(
            f"{_CHANGES}"
            "::test_an_automatic_offload_waits_for_a_manual_one_and_a_manual_one_is_refused"
        ),
    ),
    Mutant(
        "repeated-save-is-a-conflict",
        "A save whose first answer was lost is taken for another owner's.",
        "a compare-and-set that a client repeats by itself",
        """
        streammeta.brokers.pulsar.cluster_lists:
        - if result.error == common_pb2.ERROR_CODE_KEY_EXIST and result.value == item.value:
        + if False:
              # The answer to an earlier attempt of this call was lost.
              return result.version
        """,
        Tested(f"{_CHANGES}::test_a_save_that_a_client_repeats_is_no_save_of_another"),
    ),
    # ---- reads ----
    Mutant(
        "block-read-from-its-start",
        "A read in the middle of a block fetches the block from its start, on every call.",
        "1,416 MiB of requests for a ledger of 16 MiB",
        """
        streammeta.brokers.pulsar.block_reader:
        - known = self._places.find(first, block.first_entry)
        + known = None
        """,
        Tested(f"{_READS}::test_a_read_in_the_middle_begins_near_it_once_the_block_is_known"),
    ),
    Mutant(
        "read-ahead-dropped",
        "Each call fetches a whole buffer, of which the one before had the most.",
        "a buffer that lives as long as a call",
        """
        streammeta.brokers.pulsar.block_reader:
        - self._ahead = stream.ahead
          return found
        """,
        Tested(f"{_READS}::test_a_block_that_is_read_in_order_is_fetched_once"),
    ),
    Mutant(
        "places-without-a-bound",
        "Places of entries fill the memory of a broker that reads large ledgers.",
        "a cache that nobody empties",
        """
        streammeta.brokers.pulsar.formats.entry_places:
        - if len(self._kept) > self.most:
        + if False:
        """,
        Tested(f"{_READS}::test_places_are_bounded_and_the_nearest_one_is_found"),
    ),
    Mutant(
        "bytes-of-no-entry-end-a-read",
        "Bytes between two entries end a read, though the entry behind them is whole.",
        "a reader that wants each entry where the one before ends",
        """
        streammeta.brokers.pulsar.block_reader:
        - if found is None:
        + if True:
              _, entry_id = decode_entry_header(head)
        """,
        Tested(f"{_READS}::test_bytes_of_no_entry_are_skipped"),
    ),
    Mutant(
        "data-taken-for-a-head",
        "An entry whose head is damaged is replaced with a part of its own data.",
        "a search for the next thing that looks right",
        """
        streammeta.brokers.pulsar.formats.blocks:
        - if is_own_length or is_own_id:
        + if False:
              return None
        """,
        Tested(f"{_READS}::test_a_damaged_head_is_not_taken_for_bytes_of_no_entry"),
    ),
    Mutant(
        "zeros-are-an-entry",
        "Zeros in front of entry 0 are read as an empty entry 0.",
        "a head that is believed for its id alone",
        """
        streammeta.brokers.pulsar.formats.blocks:
        - return length if length or _is_followed(head, ENTRY_HEADER_SIZE, wanted, room) else None
        + return length
        """,
        Tested(f"{_READS}::test_bytes_of_no_entry_are_skipped"),
    ),
    Mutant(
        "handles-without-a-bound",
        "A reader keeps an index and a buffer of every ledger that was ever read.",
        "found by a trial: 3,000 ledgers read, 3,000 handles open",
        """
        streammeta.brokers.pulsar.ledger_reader:
        - while len(self._open) > OPEN_HANDLES:
        + while False:
        """,
        Tested(f"{_READS}::test_a_reader_keeps_few_copies_open"),
    ),
    Mutant(
        "second-handle-lost",
        "Two first reads of a ledger open two handles, of which one is never closed.",
        "a look before an await and an entry after it",
        """
        streammeta.brokers.pulsar.ledger_reader:
        - if place in self._open:
        + if False:
              handle.close()
        """,
        Tested(f"{_READS}::test_two_first_reads_of_a_ledger_open_one_handle"),
    ),
    Mutant(
        "absent-field-written",
        "The list that a Pulsar broker reads has fields that it leaves out itself.",
        "proto2, which tells a field that is absent from one that is false",
        """
        streammeta.brokers.pulsar.formats.ledger_values:
          _uuid_fields(self.uuid),
          # The peer leaves the field out instead of writing false.
        - wire.number_field(3, 1 if self.complete else None),
        + wire.number_field(3, int(self.complete)),
          wire.number_field(4, deleted),
        """,
        Tested(f"{_READS}::test_a_copy_that_is_not_whole_has_no_field_for_it"),
    ),
    # ---- automatic offload ----
    Mutant(
        "retention-as-long-as-the-offload",
        "A policy is accepted by which retention deletes each ledger when it is offloaded.",
        "a bound that is compared one off",
        """
        streammeta.brokers.pulsar.policies:
        - if _is_bound(wanted) and _is_bound(bound) and wanted >= bound:
        + if _is_bound(wanted) and _is_bound(bound) and wanted > bound:
        """,
        Tested(f"{_POLICIES}::test_retention_does_not_delete_before_the_offload"),
    ),
    Mutant(
        "topic-replaces-its-namespace",
        "A topic that overrides one value loses all others of its namespace.",
        "policies that are looked up, not joined",
        """
        streammeta.brokers.pulsar.policies:
        - return replace(self, **other.values)
        + return other if other.values else self
        """,
        Tested(f"{_POLICIES}::test_a_topic_overrides_single_values_of_its_namespace"),
    ),
    Mutant(
        "policies-not-checked-together",
        "A policy of a namespace is accepted that contradicts the retention of a topic.",
        "a check of the value that was given alone",
        """
        streammeta.brokers.pulsar.policy_store:
        - changed.check()
        """,
        Tested(f"{_POLICIES}::test_a_policy_that_contradicts_retention_changes_nothing"),
    ),
    Mutant(
        "policy-put-over-another",
        "Of two operators' changes at once one is lost, unchecked.",
        "a put without the version that was read",
        """
        streammeta.brokers.pulsar.policy_store:
        - expected_version=version,
        + overwrite=True,
        """,
        Tested(f"{_POLICIES}::test_changes_of_two_operators_are_checked_together"),
    ),
    Mutant(
        "source-deleted-by-a-wall-clock",
        "A jump of one machine's clock deletes the sources of all copies at once.",
        "lease expiry by the clock of whoever looks",
        """
        streammeta.brokers.pulsar.automatic_offload:
        - await topic.managed.delete_sources(lag_ms, among=watched)
        + await topic.managed.delete_sources(lag_ms)
        """,
        Tested(f"{_AUTOMATIC}::test_no_jump_of_a_wall_clock_deletes_a_source"),
    ),
    Mutant(
        "slow-topic-holds-up-all",
        "One topic whose offload hangs keeps all others from being offloaded.",
        "rounds that wait for their slowest part",
        """
        streammeta.brokers.pulsar.automatic_offload:
          try:
        -     await self._begin_round()
        +     await self.run_once()
        """,
        Tested(f"{_AUTOMATIC}::test_a_topic_that_is_slow_holds_up_no_other"),
    ),
    Mutant(
        "stopped-offload-goes-on",
        "A broker that has stopped its offloads still copies ledgers.",
        "a stop of the loop, and not of its work",
        """
        streammeta.brokers.pulsar.automatic_offload:
        - await _cancel(*self._offloads, self._running)
        + await _cancel(self._running)
        """,
        Tested(
            f"{_AUTOMATIC}::test_stopping_ends_an_offload_and_the_next_one_leaves_nothing_of_it"
        ),
    ),
    Mutant(
        "unread-policies-end-the-loop",
        "Controllers that are away for a moment end the offload for ever.",
        "an error that nobody expects in a background task",
        """
        streammeta.brokers.pulsar.automatic_offload:
        - except Exception as error:  # noqa: BLE001 - the next round must come
        + except PolicyError as error:
              _log.warning(
                  "policies can't be read, retrying in %g s: %s", self._interval_s, error
        """,
        Tested(f"{_AUTOMATIC}::test_policies_that_can_not_be_read_end_no_loop"),
    ),
    Mutant(
        "uploads-of-a-segment-at-once",
        "Two uploads of one segment mix their blocks, and its index names other bytes.",
        "a position that is read before an await, without a lock",
        """
        streammeta.brokers.pulsar.streaming:
        - async with self._uploading:
        + if True:
              while self._waiting_bytes >= self._limits.block_bytes:
        """,
        Tested("tests/brokers/test_pulsar_streaming.py::test_uploads_of_one_segment_take_turns"),
    ),
    # ---- calls side by side in another shape ----
    Mutant(
        "two-uploads-of-one-index-file",
        "Two checkpoints at once upload one index file twice, and destroy each other's bytes.",
        "a look before an await and a change after it",
        """
        streammeta.brokers.rocketmq.key_index_service:
        - async with self._storing:
        + if True:
              for begin in self.begins_ms:
                  file = self._files[begin]
                  if file.status is IndexStatus.SEALED and file.local is not None:
        """,
        Tested(f"{_SIDE_BY_SIDE}::test_an_index_file_is_uploaded_once_and_is_local_no_more"),
    ),
    Mutant(
        "second-files-of-a-queue",
        "Two first looks at a queue give it two sets of files, of which reads see one.",
        "a look before an await and an entry after it",
        """
        streammeta.brokers.rocketmq.cluster.cluster_store:
        - self.files.setdefault(queue, file)
        + self.files[queue] = file
        """,
        Tested(f"{_SIDE_BY_SIDE}::test_two_first_looks_at_a_queue_find_the_same_files"),
    ),
    Mutant(
        "own-put-fences-the-broker",
        "A put whose answer was lost is taken for another process, and the broker ends.",
        "a version that is believed after an unknown outcome",
        """
        streammeta.brokers.rocketmq.cluster.cluster_metadata:
        - if not self._unsettled:
        + if True:
              return
        """,
        Tested(f"{_SIDE_BY_SIDE}::test_a_put_whose_answer_was_lost_is_no_other_process"),
    ),
    Mutant(
        "keys-of-a-successor-adopted",
        "After a lost answer a former process takes its successor's keys for its own.",
        "an outcome that is settled without looking who owns the keys",
        """
        streammeta.brokers.rocketmq.cluster.cluster_metadata:
        - if not isinstance(time, dict) or time.get("owner") != self._time_value()["owner"]:
        + if not isinstance(time, dict):
              # Another owner's value: a later process has started.
              raise self._fence(time_key)
        """,
        Tested(f"{_SIDE_BY_SIDE}::test_a_lost_answer_hides_no_process_that_has_taken_over"),
    ),
    Mutant(
        "late-put-fences-the-broker",
        "A put that takes effect after its caller gave up is taken for another process.",
        "an outcome that was read before the put arrived",
        """
        streammeta.brokers.rocketmq.cluster.cluster_metadata:
        - self._may_change_late |= self._unsettled
        """,
        Tested(f"{_SIDE_BY_SIDE}::test_a_put_that_takes_effect_late_is_no_other_process"),
    ),
    Mutant(
        "late-put-keeps-a-key",
        "A key that a late put has changed can never be deleted, and the broker ends.",
        "a deletion at a version that is no longer stored",
        """
        streammeta.brokers.rocketmq.cluster.cluster_metadata:
        - if left := [key for key, _ in failed if key in self._kept]:
        + if left := []:
              await self._delete(left)
        """,
        Tested(f"{_SIDE_BY_SIDE}::test_a_put_that_takes_effect_late_is_deleted_with_its_key"),
    ),
    Mutant(
        "reopened-under-a-remembered-epoch",
        "A segment takes no more messages after the answer to the opening of its stream was lost.",
        "an epoch that is believed after an unknown outcome",
        """
        streammeta.brokers.rocketmq.cluster.cluster_metadata:
        - epoch = epochs.get(known.stream_id, known.epoch)
        + epoch = known.epoch
        """,
        Tested(f"{_SIDE_BY_SIDE}::test_a_stream_is_reopened_after_a_lost_answer"),
    ),
    Mutant(
        "deletion-of-a-stream-that-is-gone",
        "A segment can never be deleted after the answer to the deletion of its stream was lost.",
        "a repeated deletion that fails because the first one took effect",
        """
        streammeta.brokers.rocketmq.cluster.cluster_metadata:
        - await self._delete_streams(await self._read_epochs([stream.stream_id]))
        + await self._delete_streams({stream.stream_id: stream.epoch})
        """,
        Tested(f"{_SIDE_BY_SIDE}::test_a_stream_is_deleted_after_a_lost_answer"),
    ),
)
