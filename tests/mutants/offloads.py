"""Mutants of copies in tiered storage: RocketMQ's segments and index, Pulsar's ledgers."""

from tests.mutants.mutant import Mutant, Tested

_ROCKETMQ = "tests/brokers/test_rocketmq_failures.py"
_POOL = "tests/brokers/test_rocketmq_upload_pool.py"
_STREAMS = "tests/brokers/test_pulsar_ledger_streams.py"
_BLOBS = "tests/brokers/test_pulsar_bucket_blobs.py"
_PULSAR = "tests/brokers/test_pulsar_failures.py"

OFFLOADS = (
    # ---- RocketMQ ----
    Mutant(
        "rolled-over-a-failed-commit",
        "A segment that can't be committed is followed by another, and its bytes are lost.",
        "a roll that does not look whether the last upload succeeded",
        """
        streammeta.brokers.rocketmq.segments.flat_file:
        - if not self.writable().closed and not await self.seal():
        -     return AppendResult.UNKNOWN_ERROR
        + if not self.writable().closed:
        +     await self.seal()
        """,
        Tested(f"{_ROCKETMQ}::test_a_full_segment_that_can_not_be_committed_is_followed_by_none"),
    ),
    Mutant(
        "segment-not-in-the-metadata",
        "A segment takes bytes that no restart finds, as the metadata was not saved.",
        "metadata that is saved with the next commit",
        """
        streammeta.brokers.rocketmq.segments.flat_file:
        - await self._place.keeper.save()
          # Appended only after the save: the metadata never misses a segment with bytes.
          self.segments.append(segment)
        """,
        Tested(f"{_ROCKETMQ}::test_a_segment_takes_nothing_before_the_metadata_has_it"),
    ),
    Mutant(
        "unknown-size-is-empty",
        "A segment whose size is not known is opened empty, and overwritten.",
        "a backend that is out of reach when the broker starts",
        """
        streammeta.brokers.rocketmq.segments.flat_file:
          if size is None:
        -     raise SizeUnknownError(self.path, metadata.base_offset)
        +     size = 0
        """,
        Tested(f"{_ROCKETMQ}::test_a_segment_of_unknown_size_is_not_taken_for_an_empty_one"),
    ),
    Mutant(
        "metadata-forgets-before-the-store",
        "A segment whose deletion fails is in no metadata, and its bytes stay for ever.",
        "deletion in the order of creation",
        """
        streammeta.brokers.rocketmq.segments.flat_file:
        - await segment.delete()
          self._place.keeper.table.delete_segments(self.path, self.kind, segment.base_offset)
          await self._place.keeper.save()
        + await segment.delete()
        """,
        Tested(
            f"{_ROCKETMQ}"
            "::test_a_segment_that_can_not_be_deleted_stays_in_the_metadata_and_goes_later"
        ),
    ),
    Mutant(
        "waiting-bytes-expire",
        "A segment expires with bytes that are not committed yet.",
        "expiry by time alone",
        """
        streammeta.brokers.rocketmq.segments.flat_file:
        - if is_last and head.needs_commit:
        -     return False
        """,
        Tested(f"{_ROCKETMQ}::test_what_waits_for_a_commit_does_not_expire"),
    ),
    Mutant(
        "item-without-its-message",
        "An item is appended though the log took no message, and points at another's bytes.",
        "two appends of which only the second is checked",
        """
        streammeta.brokers.rocketmq.message_file:
          result = await self.append_commit_log(message)
        - if result is not AppendResult.SUCCESS:
        + if result is AppendResult.FILE_FULL:
              return result
        """,
        Tested(f"{_ROCKETMQ}::test_an_item_is_appended_only_if_its_message_was"),
    ),
    Mutant(
        "hole-over-waiting-messages",
        "A queue skips offsets while messages before them wait, which are then lost.",
        "a commit whose result is not looked at",
        """
        streammeta.brokers.rocketmq.message_file:
        - if not await self.commit():
        + await self.commit()
        + if False:
        """,
        Tested(f"{_ROCKETMQ}::test_no_hole_is_made_over_messages_that_wait"),
    ),
    Mutant(
        "messages-expire-before-their-items",
        "Items point at messages that are deleted already.",
        "two files that are cleaned in any order",
        """
        streammeta.brokers.rocketmq.message_file:
        - deleted = await self._expire(self.consume_queue, before_ms, created_before_ms)
        - return deleted + await self._expire(self.commit_log, before_ms, created_before_ms)
        + deleted = await self._expire(self.commit_log, before_ms, created_before_ms)
        + return deleted + await self._expire(self.consume_queue, before_ms, created_before_ms)
        """,
        Tested(f"{_ROCKETMQ}::test_items_expire_before_the_messages_that_they_point_at"),
    ),
    Mutant(
        "dispatched-above-the-confirmed-end",
        "Messages are moved that a failover of the broker takes back.",
        "a read that returns more than was asked for",
        """
        streammeta.brokers.rocketmq.dispatch:
        - for message in self.local.read(offset, count)[:count]:
        + for message in self.local.read(offset, count):
        """,
        Tested(f"{_ROCKETMQ}::test_nothing_above_the_dispatchable_end_is_moved"),
    ),
    Mutant(
        "keys-before-their-messages",
        "The index names messages that are not committed.",
        "an index that is written beside the upload",
        """
        streammeta.brokers.rocketmq.dispatch:
        - if context is not None and self.file.commit_offset >= context.end_offset:
        + if context is not None:
        """,
        Tested(f"{_ROCKETMQ}::test_keys_wait_for_their_items_too"),
    ),
    Mutant(
        "keys-of-a-failed-commit-dropped",
        "Keys of a group whose first commit failed are never indexed.",
        "state that is cleared whatever the outcome",
        """
        streammeta.brokers.rocketmq.dispatch:
        -     self.context = None

        - return done
        + self.context = None
        + return done
        """,
        Tested(
            f"{_ROCKETMQ}::test_keys_wait_for_the_commit_of_their_messages_and_are_indexed_once"
        ),
    ),
    Mutant(
        "index-file-removed-before-it-is-noted",
        "A crash in between leaves an index file that no restart finds.",
        "a move of two steps in the wrong order",
        """
        streammeta.brokers.rocketmq.key_index_service:
        - await self._shelf.note_uploaded(file.begin_ms)
          await self._shelf.remove(file.begin_ms)
        + await self._shelf.note_uploaded(file.begin_ms)
        """,
        Tested(f"{_ROCKETMQ}::test_an_index_file_is_found_wherever_its_upload_ends"),
    ),
    Mutant(
        "failed-index-upload-counts",
        "An index file whose upload failed is removed from the disk.",
        "a result that is not looked at",
        """
        streammeta.brokers.rocketmq.key_index_service:
        - if not await segment.commit():
        + await segment.commit()
        + if False:
              return False
        """,
        Tested(f"{_ROCKETMQ}::test_an_index_file_whose_upload_fails_stays_local_and_goes_later"),
    ),
    Mutant(
        "index-file-by-the-clock-alone",
        "After the clock was set back a new index file takes the place of an old one.",
        "names made of the time",
        """
        streammeta.brokers.rocketmq.key_index_service:
        - begin = max(self._now_ms(), max(self._files, default=-1) + 1)
        + begin = self._now_ms()
        """,
        Tested(f"{_ROCKETMQ}::test_index_files_begin_apart_though_the_clock_is_set_back"),
    ),
    Mutant(
        "index-upload-goes-on-behind-remains",
        "An upload is appended to the remains of one that was killed.",
        "segments that take appends",
        """
        streammeta.brokers.rocketmq.key_index_service:
        - await segment.storage.destroy()
          segment.append(local.compact(), local.end_ms)
        """,
        Tested(f"{_ROCKETMQ}::test_remains_of_a_killed_upload_are_not_a_part_of_the_next"),
    ),
    Mutant(
        "one-refused-write-fails-its-group",
        "A queue whose stream is fenced fails the writes of all others.",
        "one error for all that share an upload",
        """
        streammeta.brokers.rocketmq.cluster.upload_pool:
        - if not any(refused):
        + if any(refused):
        """,
        Tested(f"{_POOL}::test_a_refused_write_leaves_its_group_and_the_others_are_committed"),
    ),
    Mutant(
        "refused-value-counts-as-written",
        "A write whose value was refused counts as committed.",
        "verdicts of which only the first kind is looked at",
        """
        streammeta.brokers.rocketmq.cluster.upload_pool:
        - return [ranged or put for ranged, put in zip(ranges, puts, strict=True)]
        + return [ranged for ranged, put in zip(ranges, puts, strict=True)]
        """,
        Tested(f"{_POOL}::test_a_refused_write_leaves_its_group_and_the_others_are_committed"),
    ),
    Mutant(
        "expired-object-for-ever",
        "A pool uploads again and again what no commit takes.",
        "retries without a bound",
        """
        streammeta.brokers.rocketmq.cluster.upload_pool:
        - attempts += 1
        """,
        Tested(f"{_POOL}::test_an_object_that_expired_is_uploaded_again_a_few_times"),
    ),
    Mutant(
        "pool-without-a-bound",
        "Writes are held in memory without a bound while the store is slow.",
        "admission that counts calls, not bytes",
        """
        streammeta.brokers.rocketmq.cluster.upload_pool:
        - lambda: not self._held or self._held + size <= self._config.max_bytes
        + lambda: True
        """,
        Tested(f"{_POOL}::test_the_pool_holds_no_more_than_its_bound_or_one_larger_write"),
    ),
    Mutant(
        "writes-left-behind-by-a-closed-pool",
        "Writes that wait when the pool is closed wait for ever.",
        "a close that ends the work and not the waiting",
        """
        streammeta.brokers.rocketmq.cluster.upload_pool:
        - for waiting in self._waiting:
        -     waiting.done.cancel()
          await self._pipeline.close(0)
        """,
        Tested(f"{_POOL}::test_writes_that_wait_end_with_the_pool"),
    ),
    # ---- Pulsar ----
    Mutant(
        "copy-of-other-entries",
        "Entries that a source lost or repeats are copied as they come; then it is deleted.",
        "found by a test: only one of the two kinds of copies compared entry ids",
        """
        streammeta.brokers.pulsar.offloader:
        - if not ids or ids != list(range(first, first + len(ids))) or ids[-1] > last:
        + if not ids:
        """,
        Tested(f"{_PULSAR}::test_a_source_that_gives_other_entries_than_it_has_is_not_copied"),
    ),
    Mutant(
        "data-left-by-a-failed-offload",
        "An offload whose index can't be written leaves its data object.",
        "clean-up of the step that failed alone",
        """
        streammeta.brokers.pulsar.offloader:
        - await self._blobs.delete(names)
        + await self._blobs.delete(names[1:])
        """,
        Tested(f"{_PULSAR}::test_a_failed_offload_leaves_neither_object_nor_parts"),
    ),
    Mutant(
        "parts-left-by-a-failed-offload",
        "The parts of a failed offload stay in the bucket, where no listing shows them.",
        "multipart uploads that nobody aborts",
        """
        streammeta.brokers.pulsar.offloader:
        - await upload.abort()
          raise
        """,
        Tested(f"{_PULSAR}::test_a_failed_offload_leaves_neither_object_nor_parts"),
    ),
    Mutant(
        "open-ledger-offloaded",
        "A ledger that still takes entries is copied, and the copy lacks the last ones.",
        "a check of its size alone",
        """
        streammeta.brokers.pulsar.offloader:
        - if not ledger.is_closed or metadata.last_entry < 0 or metadata.length <= 0:
        + if metadata.last_entry < 0 or metadata.length <= 0:
        """,
        Tested(f"{_PULSAR}::test_what_is_open_or_empty_is_not_copied_and_a_reader_copies_nothing"),
    ),
    Mutant(
        "failed-segment-takes-entries",
        "A segment whose upload failed takes entries, and its data have a hole.",
        "an upload that goes on with its next part",
        """
        streammeta.brokers.pulsar.streaming:
          while self._waiting_bytes >= self._limits.block_bytes:
        -     await self._abandon_on_failure(self._upload_block)
        +     await self._upload_block()
        """,
        Tested(f"{_PULSAR}::test_a_segment_whose_upload_fails_leaves_nothing_and_takes_nothing"),
    ),
    Mutant(
        "segment-parts-left",
        "The parts of an abandoned segment stay in the bucket.",
        "multipart uploads that nobody aborts",
        """
        streammeta.brokers.pulsar.streaming:
        - if self._upload is not None:
        -     await self._upload.abort()
        """,
        Tested(f"{_PULSAR}::test_a_segment_that_is_abandoned_leaves_nothing"),
    ),
    Mutant(
        "earlier-segment-counts",
        "Entries that two segments hold are read from the one that was given up.",
        "segments searched from the first on",
        """
        streammeta.brokers.pulsar.segments:
        - for part in reversed(self._parts):
        + for part in sorted(self._parts, key=lambda one: -one.first_entry)[1:]:
        """,
        Tested(f"{_PULSAR}::test_of_two_segments_with_an_entry_the_later_one_counts"),
    ),
    Mutant(
        "half-a-segment-is-read",
        "A segment that is still being written is read.",
        "lists that name what has begun",
        """
        streammeta.brokers.pulsar.ledger_reader:
        - uuids = [segment.uuid for segment in context.segments if segment.complete]
        + uuids = [segment.uuid for segment in context.segments]
        """,
        Tested(f"{_PULSAR}::test_a_segment_that_is_not_whole_is_not_read"),
    ),
    Mutant(
        "handle-by-ledger-alone",
        "A ledger that was offloaded again is read from its former copy, which is deleted.",
        "caches whose keys leave out what may change",
        """
        streammeta.brokers.pulsar.ledger_reader:
        - place = ledger_id, context.uuid or ",".join(uuids)
        + place = ledger_id, ""
        """,
        Tested(f"{_PULSAR}::test_a_ledger_that_was_offloaded_again_is_read_from_its_new_copy"),
    ),
    Mutant(
        "native-copy-whole-before-it-is-committed",
        "A native copy counts as whole though some of its entries were not committed.",
        "a flush that is taken for success",
        """
        streammeta.brokers.pulsar.ledger_streams:
        - for future in appended:
              # Raises the error of an append that was not committed.
        -     await future
          # A closed stream rejects entries of a replaced process.
          (await self._client.close_streams([stream_id])).require_all()
        """,
        Tested(f"{_STREAMS}::test_an_offload_that_fails_leaves_neither_stream_nor_key"),
    ),
    Mutant(
        "half-made-native-copy-is-read",
        "A copy whose process died is opened as if it were whole.",
        "a key that exists since the copy was begun",
        """
        streammeta.brokers.pulsar.ledger_streams:
        - if found is None or found.metadata is None:
        + if found is None:
        """,
        Tested(f"{_STREAMS}::test_a_half_made_copy_is_not_read_and_goes_later"),
    ),
    Mutant(
        "key-deleted-before-its-stream",
        "A stream whose deletion fails has no key any more that names it.",
        "deletion in the order of creation",
        """
        streammeta.brokers.pulsar.ledger_streams:
        - if streams:
        -     await self._delete_streams(streams)
          # Forgotten only after the deletion, which may fail and be repeated.
          self._strays.pop((ledger_id, uuid), None)
          if found is not None:
              await self._delete_key(name)
        + if streams:
        +     await self._delete_streams(streams)
        """,
        Tested(f"{_STREAMS}::test_the_key_stays_until_the_stream_is_deleted"),
    ),
    Mutant(
        "stray-streams-of-others",
        "A sweep finds streams of another managed ledger, and deletes them as left over.",
        "tags of which only one is compared",
        """
        streammeta.brokers.pulsar.ledger_streams:
        - place = _place(name) if name is not None and mine and name not in keyed else None
        + place = _place(name) if name is not None and name not in keyed else None
        """,
        Tested(
            f"{_STREAMS}::test_streams_without_a_key_are_found_by_tags_and_those_of_others_are_not"
        ),
    ),
    Mutant(
        "kept-blob-counts-as-deleted",
        "Objects that the store kept count as deleted, and nothing names them any more.",
        "DeleteObjects, which answers 200 with an error for each key",
        """
        streammeta.brokers.pulsar.blobs.bucket_blobs:
        - if result.failed:
        + if False:
        """,
        Tested(f"{_BLOBS}::test_a_blob_that_the_store_keeps_is_not_deleted_and_the_error_names_it"),
    ),
    Mutant(
        "failed-listing-is-an-empty-place",
        "A listing that fails shows a place without copies.",
        "errors that are turned into defaults",
        """
        streammeta.brokers.pulsar.blobs.bucket_blobs:
          try:
              return await run_blocking(
                  lambda: [object_.key for object_ in self._store.list_objects()]
              )
          except StorageError as error:
        -     raise BlobError(str(error)) from error
        +     return []
        """,
        Tested(f"{_BLOBS}::test_a_listing_that_fails_is_no_empty_place"),
    ),
    Mutant(
        "failed-abort-counts-as-dropped",
        "An upload that could not be aborted counts as dropped, and its parts stay.",
        "clean-up whose errors are of no interest",
        """
        streammeta.brokers.pulsar.blobs.bucket_blobs:
        - if not _is_gone(error):
        + if False:
        """,
        Tested(f"{_BLOBS}::test_an_upload_that_is_gone_counts_as_dropped_and_any_other_does_not"),
    ),
    Mutant(
        "topic-id-used-again",
        "A new topic gets the id of a deleted one, and its keys find the other's messages.",
        "ids that are counted, not drawn from a counter",
        """
        streammeta.brokers.rocketmq.formats.metadata:
        - self.last_topic_id += 1
        + self.last_topic_id = len(self.topics)
        """,
        Tested(f"{_ROCKETMQ}::test_the_id_of_a_deleted_topic_is_not_used_again"),
    ),
)
