"""Mutants of the brokers' shapes: batches, groups, segments, ledgers."""

from tests.mutants.mutant import Mutant, Tested

_LOG = "tests/brokers/test_partition_log.py"
_PRODUCERS = "tests/brokers/test_producer_states.py"
_TAIL = "tests/brokers/test_tail_cache.py"
_GROUPS = "tests/brokers/test_groups.py"
_SEGMENTS = "tests/brokers/test_rocketmq_segments.py"
_LEDGERS = "tests/brokers/test_pulsar_ledger_list.py"

SHAPES = (
    # ---- Kafka ----
    Mutant(
        "repeat-by-first-sequence",
        "A batch with a known first sequence and another last one is acknowledged, not written.",
        "a producer that splits a batch and sends its halves again",
        """
        streammeta.brokers.partition.producer_state:
        - wanted = (batch.base_sequence, batch.last_sequence)
        + wanted = batch.base_sequence
          return next(
        -     (old for old in known.batches if (old.first_sequence, old.last_sequence) == wanted),
        +     (old for old in known.batches if old.first_sequence == wanted),
        """,
        Tested(f"{_PRODUCERS}::test_a_repeat_has_the_same_epoch_and_both_sequences"),
    ),
    Mutant(
        "repeat-of-another-producer-epoch",
        "A batch of a new producer epoch passes for a repeat of one of the former epoch.",
        "KAFKA-5793: idempotent producers that reset their sequence",
        """
        streammeta.brokers.partition.producer_state:
        - if known is None or known.epoch != batch.producer_epoch:
        + if known is None:
              return None
          wanted = (batch.base_sequence, batch.last_sequence)
        """,
        Tested(f"{_PRODUCERS}::test_a_repeat_has_the_same_epoch_and_both_sequences"),
    ),
    Mutant(
        "new-producer-epoch-begins-anywhere",
        "The first batches of a new producer epoch may be lost without an error.",
        "Kafka requires sequence 0 after a bump of the epoch",
        """
        streammeta.brokers.partition.producer_state:
        - wanted = 0 if epoch > known.epoch else sequence_after(known.batches[-1].last_sequence)
        - if first_sequence != wanted:
        + wanted = sequence_after(known.batches[-1].last_sequence)
        + if epoch == known.epoch and first_sequence != wanted:
        """,
        Tested(f"{_PRODUCERS}::test_a_new_epoch_begins_with_sequence_0"),
    ),
    Mutant(
        "tail-read-before-it-is-durable",
        "Consumers read batches from memory that a failed upload takes back.",
        "dirty reads of a leader's log above its high watermark",
        """
        streammeta.brokers.partition.log:
        - found = self._tail.read(offset, self.high_watermark, max_bytes)
        + found = self._tail.read(offset, self._state.end_offset, max_bytes)
        """,
        Tested(f"{_LOG}::test_nothing_is_read_before_it_is_durable"),
    ),
    Mutant(
        "failed-log-goes-on",
        "Appends after a failed one are acknowledged, and leave a hole in the log.",
        "a later upload that succeeds",
        """
        streammeta.brokers.partition.log:
        - if self.failure is not None:
        + if error is not None:
              settled.set_exception(self._failure_copy())
        """,
        Tested(f"{_LOG}::test_a_failed_log_takes_nothing_though_later_appends_succeed"),
    ),
    Mutant(
        "retention-of-batches-that-are-not-durable",
        "Retention moves the start of a log past its high watermark.",
        "segments that roll while uploads are under way",
        """
        streammeta.brokers.partition.log:
        - await self._trim(min(kept, self.high_watermark))
        + await self._trim(kept)
        """,
        Tested(f"{_LOG}::test_records_are_not_deleted_before_they_are_durable"),
    ),
    Mutant(
        "producer-expires-with-its-oldest-batch",
        "A producer that is active is forgotten, and a batch it lost passes.",
        "expiry by the first remembered batch",
        """
        streammeta.brokers.partition.producer_state:
        - if known.batches[-1].timestamp > now_ms - EXPIRATION_MS
        + if known.batches[0].timestamp > now_ms - EXPIRATION_MS
        """,
        Tested(f"{_PRODUCERS}::test_a_producer_expires_when_its_newest_batch_has_the_age"),
    ),
    Mutant(
        "tail-forgets-its-newest",
        "A batch larger than the cache is dropped, and a reader at the end finds a hole.",
        "bounds that count the entry they are for",
        """
        streammeta.brokers.partition.tail_cache:
        - while self._size > self._max_bytes and len(self._batches) > 1:
        + while self._size > self._max_bytes and self._batches:
        """,
        Tested(f"{_TAIL}::test_the_oldest_batches_leave_first_and_the_newest_stays"),
    ),
    Mutant(
        "commit-while-a-rebalance-completes",
        "A member commits offsets of partitions that it may not have in the new generation.",
        "KAFKA-9835-like commits between JoinGroup and SyncGroup",
        """
        streammeta.brokers.kafka.groups.groups:
        - if code is Code.NONE and self.state is State.COMPLETING:
        + if code is Code.NONE and self.state is State.EMPTY:
              return Code.REBALANCE_IN_PROGRESS
          return code
        """,
        Tested(f"{_GROUPS}::test_no_commit_while_a_rebalance_completes"),
    ),
    Mutant(
        "rebalance-waits-for-ever",
        "A member that does not join again holds its group up.",
        "max.poll.interval.ms of Kafka",
        """
        streammeta.brokers.kafka.groups.groups:
        - if self.state is State.PREPARING and now >= self.rebalance_deadline:
        + if self.is_initial and now >= self.rebalance_deadline:
        """,
        Tested(f"{_GROUPS}::test_members_that_do_not_join_in_time_are_left_out"),
    ),
    # ---- RocketMQ ----
    Mutant(
        "gap-between-chunks",
        "A segment with a lost chunk is opened, and reads answer with bytes of another place.",
        "the source trusts the listing",
        """
        streammeta.brokers.rocketmq.segments.chunked_segment:
        - if chunk.start != end:
        + if chunk.start < end:
        """,
        Tested(f"{_SEGMENTS}::test_chunks_that_do_not_follow_each_other_are_refused"),
    ),
    Mutant(
        "chunk-replaced",
        "Two writers of a segment overwrite each other's chunks.",
        "puts without a condition",
        """
        streammeta.brokers.rocketmq.segments.chunked_segment:
        - await run_blocking(self._store.put, key, data, if_absent=True)
        + await run_blocking(self._store.put, key, data)
        """,
        Tested(
            f"{_SEGMENTS}::test_a_chunk_of_another_writer_stays_and_is_not_taken_for_the_own_one"
        ),
    ),
    Mutant(
        "foreign-chunk-counts-as-stored",
        "A chunk of another writer with as many bytes counts as the own commit.",
        "settling a failed commit by its size alone",
        """
        streammeta.brokers.rocketmq.segments.chunked_segment:
        - self._has_other_writer = self._has_other_writer or stored != data
        + self._has_other_writer = False
        """,
        Tested(
            f"{_SEGMENTS}::test_a_chunk_of_another_writer_stays_and_is_not_taken_for_the_own_one"
        ),
    ),
    Mutant(
        "impossible-size-believed",
        "A commit that failed is settled by a size that it can't have left.",
        "a backend that answers from a cache or for another segment",
        """
        streammeta.brokers.rocketmq.segments.file_segment:
        - if size is None or not body.position <= size <= body.end:
        + if size is None:
        """,
        Tested(f"{_SEGMENTS}::test_a_size_that_can_not_be_is_not_believed"),
    ),
    Mutant(
        "whole-body-sent-again",
        "The part of a failed commit that was stored is stored twice.",
        "a retry from the start of the body",
        """
        streammeta.brokers.rocketmq.segments.file_segment:
        - data = body.rest_from(self.commit_position)
        + data = body.data
        """,
        Tested(f"{_SEGMENTS}::test_a_commit_that_failed_goes_on_where_the_backend_is"),
    ),
    # ---- Pulsar ----
    Mutant(
        "source-of-an-incomplete-copy-is-due",
        "The source of a half-made copy is deleted.",
        "a context that exists since the offload began",
        """
        streammeta.brokers.pulsar.ledger_list:
        - if context is None or not context.complete or context.source_deleted:
        + if context is None or context.source_deleted:
        """,
        Tested(f"{_LEDGERS}::test_a_source_is_due_after_the_lag_of_a_whole_copy"),
    ),
    Mutant(
        "sweep-reads-the-list-first",
        "A sweep deletes a copy that another process began meanwhile.",
        "a list that is older than the listing it is compared with",
        """
        streammeta.brokers.pulsar.ledger_list:
        - found = await self.copies.list_copies()
          ledgers, _ = await self.store.load()
        + found = await self.copies.list_copies()
        """,
        Tested(f"{_LEDGERS}::test_a_sweep_spares_a_copy_that_begins_meanwhile"),
    ),
    Mutant(
        "source-deleted-before-it-is-noted",
        "An owner that was replaced deletes sources that its successor still reads.",
        "deletion before the save that fences",
        """
        streammeta.brokers.pulsar.ledger_list:
        + if choose(info) is not None:
        +     await self.sources.delete(info.ledger_id)
          if choose(info) is not None and await self._set_context(info.ledger_id, choose):
        -     await self.sources.delete(info.ledger_id)
        """,
        Tested(f"{_LEDGERS}::test_a_source_goes_only_after_the_list_says_so"),
    ),
    Mutant(
        "trim-deletes-before-it-saves",
        "An owner that was replaced deletes ledgers that the list still names.",
        "deletion before the save that fences",
        """
        streammeta.brokers.pulsar.ledger_list:
        - await self._change(change)
        + change(self.ledgers)
          first_error: Exception | None = None
          for info in gone:
              try:
                  if info.context is not None:
                      await self._delete_copy(info.ledger_id, info.context)
                  # The list may say of a source that it is deleted though a crash came before.
                  await self.sources.delete(info.ledger_id)
              except Exception as error:  # noqa: BLE001 - the first is raised when all were tried
                  first_error = first_error or error
        + await self._change(change)
        """,
        Tested(f"{_LEDGERS}::test_an_owner_that_was_replaced_deletes_nothing"),
    ),
    Mutant(
        "other-copy-counts-as-complete",
        "A ledger that got another uuid is noted as offloaded under it.",
        "two offloads of one ledger",
        """
        streammeta.brokers.pulsar.ledger_list:
        - if info.context is None or info.context.uuid != uuid:
        + if info.context is None:
        """,
        Tested(f"{_LEDGERS}::test_a_copy_whose_ledger_got_another_is_deleted_and_does_not_count"),
    ),
)
