"""Mutants of RocketMQ's tiered storage: dispatch, chunks in a bucket, and expiry."""

from tests.mutants.mutant import Mutant, Tested

_DISPATCH = "tests/brokers/test_rocketmq_dispatch.py"
_RETENTION = "tests/brokers/test_rocketmq_retention.py"
_CHUNKS = "tests/brokers/test_rocketmq_chunks.py"

ROCKETMQ = (
    # ---- dispatch ----
    Mutant(
        "message-stored-at-another-offset",
        "Messages are stored under the offsets that were asked for, not under their own.",
        "a local store that deletes messages between the look at its first offset and the read",
        """
        streammeta.brokers.rocketmq.dispatch:
        - if queue_offset_of(message.data) != offset + len(found):
        + if queue_offset_of(message.data) < 0:
              break
          found.append(message)
        """,
        Tested(f"{_DISPATCH}::test_messages_that_vanish_under_a_read_are_a_hole"),
    ),
    Mutant(
        "dispatch-repeats-without-progress",
        "A caller that dispatches until nothing is left never ends, and moves nothing.",
        "a message larger than a segment of the commit log",
        """
        streammeta.brokers.rocketmq.dispatch:
        - return done and has_moved and waiting > 0 and (force or self._is_due(file.append_offset))
        + return done and waiting > 0 and (force or self._is_due(file.append_offset))
        """,
        Tested(f"{_DISPATCH}::test_a_message_of_another_offset_is_not_stored"),
    ),
    Mutant(
        "empty-read-repeated",
        "A read that returns nothing is repeated at once, and the event loop stands still.",
        "a local store that deletes messages between the look at its first offset and the read",
        """
        streammeta.brokers.rocketmq.dispatch:
          if not messages:
        -     return
        +     continue
        """,
        Tested(f"{_DISPATCH}::test_messages_that_vanish_under_a_read_are_a_hole"),
    ),
    Mutant(
        "group-holds-the-event-loop",
        "A group of thousands of messages is moved without a pause.",
        "a loop whose awaits never suspend",
        """
        streammeta.brokers.rocketmq.dispatch:
        - await asyncio.sleep(0)
        """,
        Tested(f"{_DISPATCH}::test_other_tasks_run_while_a_large_group_is_moved"),
    ),
    Mutant(
        "message-appended-before-its-item-has-room",
        "While items can't be committed the same message is appended again and again.",
        "two appends of which the second one fails",
        """
        streammeta.brokers.rocketmq.message_file:
        - result = await self.consume_queue.make_room(ITEM_SIZE)
        - if result is not AppendResult.SUCCESS:
        -     return result

          result = await self.append_commit_log(message)
        """,
        Tested(f"{_DISPATCH}::test_a_refused_message_ends_the_loop_and_is_appended_once"),
    ),
    Mutant(
        "message-larger-than-a-segment-refused",
        "A queue stops for ever at a message that is larger than a segment.",
        "the peer's dispatch adds an empty segment at each try",
        """
        streammeta.brokers.rocketmq.message_file:
        - takes_larger = True
        + takes_larger = False
        """,
        Tested(f"{_DISPATCH}::test_a_message_larger_than_a_segment_has_one_of_its_own"),
    ),
    Mutant(
        "unknown-offset-is-the-smallest",
        "A queue that the local store does not know begins at -1, though it is tiered.",
        "RocketMQ 10193",
        """
        streammeta.brokers.rocketmq.tiered_view:
        - (offset for offset in (local, tiered) if offset is not None and offset >= 0), default=-1
        + (offset for offset in (local, tiered) if offset is not None), default=-1
        """,
        Tested(f"{_DISPATCH}::test_a_tier_without_messages_has_no_offset"),
    ),
    # ---- expiry ----
    Mutant(
        "reserve-time-of-a-topic-not-read",
        "Messages are kept as long as the store says, whatever their topic reserves.",
        "RIP-65: the reserve time of a topic is metadata that nothing reads",
        """
        streammeta.brokers.rocketmq.formats.metadata:
        - hours = default_hours if known is None or known.reserve_time < 1 else known.reserve_time
        + hours = default_hours
        """,
        Tested(f"{_RETENTION}::test_each_topic_keeps_its_messages_for_its_own_time"),
    ),
    Mutant(
        "deletion-not-noted-before",
        "After a crash a segment whose bytes are deleted is opened as if it had them.",
        "metadata that follows the deletion only",
        """
        streammeta.brokers.rocketmq.segments.flat_file:
          self._place.keeper.table.put_segment(deleted)
        - await self._place.keeper.save()
        """,
        Tested(f"{_RETENTION}::test_a_crash_at_any_step_loses_nothing_and_is_finished"),
    ),
    Mutant(
        "end-of-an-expired-queue-forgotten",
        "A queue whose segments have all expired begins anywhere after a crash.",
        "an end that is noted with the next commit",
        """
        streammeta.brokers.rocketmq.message_file:
        - self._note_offsets()
          deleted += await file.delete_first()
        """,
        Tested(f"{_RETENTION}::test_a_crash_at_any_step_loses_nothing_and_is_finished"),
    ),
    Mutant(
        "places-of-expired-messages-used-again",
        "New messages lie at the places of expired ones, and the key index finds them.",
        "a commit log that begins at 0 once its last segment has expired",
        """
        streammeta.brokers.rocketmq.message_file:
        - self.commit_log.resume_at(noted.log_end or await self._end_of_items())
        """,
        Tested(f"{_RETENTION}::test_a_crash_at_any_step_loses_nothing_and_is_finished"),
    ),
    Mutant(
        "deleted-under-a-reader",
        "A segment is deleted while it is read.",
        "expiry beside reads",
        """
        streammeta.brokers.rocketmq.segments.file_segment:
        - while self._readers:
        + while self._readers < 0:
        """,
        Tested(f"{_RETENTION}::test_a_deletion_waits_for_the_reads_under_way"),
    ),
    Mutant(
        "times-of-messages-move-the-clock",
        "Messages stored with a fast clock let a start with that clock delete all others.",
        "stamps that the clock in question has made",
        """
        streammeta.brokers.rocketmq.formats.metadata:
        - stamps += (segment.create_ms, segment.seal_ms)
        + stamps += (segment.create_ms, segment.seal_ms, segment.end_ms)
        """,
        Tested(f"{_RETENTION}::test_times_of_messages_move_no_clock"),
    ),
    Mutant(
        "messages-of-a-slow-clock-expire",
        "Messages stored with a clock that is behind are deleted at the next check.",
        "expiry by the times of messages alone",
        """
        streammeta.brokers.rocketmq.cluster.retention:
        - deleted += await file.expire(before_ms, before_ms)
        + deleted += await file.expire(before_ms)
        """,
        Tested(f"{_RETENTION}::test_messages_stored_with_a_slow_clock_are_kept_as_long"),
    ),
    Mutant(
        "keys-expire-before-their-messages",
        "Messages of a topic with a long reserve time are no longer found by their keys.",
        "one expiry time for what many topics share",
        """
        streammeta.brokers.rocketmq.cluster.retention:
        - longest_ms = max(table.reserve_ms(topic, hours) for topic in ("", *table.topics))
        + longest_ms = min(table.reserve_ms(topic, hours) for topic in ("", *table.topics))
        """,
        Tested(f"{_RETENTION}::test_index_files_go_once_no_topic_reserves_their_messages"),
    ),
    # ---- chunks ----
    Mutant(
        "full-segment-not-merged",
        "The chunks of a full segment are never merged.",
        "a backend whose seal nobody calls",
        """
        streammeta.brokers.rocketmq.segments.flat_file:
        - await segment.storage.seal()
          return True
        """,
        Tested(f"{_CHUNKS}::test_sealed_segments_are_merged_and_unsealed_ones_are_not"),
    ),
    Mutant(
        "unmerged-segment-not-recovered",
        "A segment whose merge a crash interrupted stays in chunks.",
        "a merge that only the writer begins",
        """
        streammeta.brokers.rocketmq.segments.chunk_store:
        - if is_sealed and chunk_prefix(self._cluster, *place) in left:
        + if is_sealed and not left:
        """,
        Tested(f"{_CHUNKS}::test_what_was_not_merged_is_merged_after_a_restart"),
    ),
    Mutant(
        "full-segment-not-sealed-at-start",
        "A segment that was full before a crash is sealed and merged with the next message only.",
        "a seal that the next append makes",
        """
        streammeta.brokers.rocketmq.segments.flat_file:
        - await self._seal_full()
        """,
        Tested(f"{_CHUNKS}::test_a_full_segment_that_was_not_sealed_is_sealed_and_merged_at_start"),
    ),
    Mutant(
        "failed-merge-not-repeated",
        "A segment whose merge fails once stays in chunks until the next start.",
        "a task that forgets what it could not do",
        """
        streammeta.brokers.rocketmq.segments.chunk_store:
        - self._waiting.rotate(-1)
        + self._waiting.popleft()
          raise
        """,
        Tested(f"{_CHUNKS}::test_a_merge_that_fails_is_repeated_and_holds_up_no_other"),
    ),
    Mutant(
        "merged-object-not-compared",
        "Chunks are deleted though the merged object does not have all their bytes.",
        "an upload that a server completes without a part",
        """
        streammeta.brokers.rocketmq.segments.chunked_segment:
        - if size != merged.size:
        + if size > merged.size:
        """,
        Tested(f"{_CHUNKS}::test_a_merged_object_of_another_size_replaces_no_chunk"),
    ),
    Mutant(
        "chunks-behind-the-merged-object-deleted",
        "Opening a segment deletes chunks that are not in the merged object.",
        "remains of a merge told by their names alone",
        """
        streammeta.brokers.rocketmq.segments.chunked_segment:
        - self._leftover = [chunk.key for chunk in chunks if chunk.end <= merged[0].end]
        + self._leftover = [chunk.key for chunk in chunks]
        """,
        Tested(f"{_CHUNKS}::test_a_chunk_behind_the_merged_object_stays"),
    ),
    Mutant(
        "write-without-an-answer-counts-by-its-size",
        "A chunk of another writer counts as the own one, because it is as large.",
        "settling a failed commit by its size alone",
        """
        streammeta.brokers.rocketmq.segments.chunked_segment:
        - self._has_other_writer = self._has_other_writer or stored != data
        + self._has_other_writer = len(stored) != len(data)
        """,
        Tested(f"{_CHUNKS}::test_a_write_without_an_answer_counts_by_its_bytes"),
    ),
    Mutant(
        "lost-chunk-shortens-the-queue",
        "A bucket that lost the last chunk is taken for a shorter queue, which is written again.",
        "the size of the last segment as the backend says it",
        """
        streammeta.brokers.rocketmq.segments.flat_file:
        - if size < metadata.size:
        + if size < 0:
        """,
        Tested(f"{_CHUNKS}::test_a_bucket_that_lost_a_chunk_is_not_taken_for_a_shorter_queue"),
    ),
    Mutant(
        "chunk-of-a-replaced-process-stops-the-queue",
        "A write that a replaced process had under way stops the queue until a restart.",
        "a lost race that is repeated",
        """
        streammeta.brokers.rocketmq.dispatch:
        - if file.has_other_writer:
        + if file.has_other_writer and file.append_offset < 0:
        """,
        Tested(f"{_CHUNKS}::test_a_chunk_of_a_replaced_process_holds_no_queue_up"),
    ),
)
