"""Mutants of the Kafka-shaped broker around its logs: calls, leadership, groups, topics, users."""

from tests.mutants.mutant import Mutant, Tested

_RECORDS = "tests/brokers/test_kafka_record_calls.py"
_SERVER = "tests/brokers/test_kafka_server.py"
_USERS = "tests/brokers/test_kafka_users.py"
_BROKER = "tests/brokers/test_kafka_broker.py"
_GROUP_CALLS = "tests/brokers/test_kafka_group_calls.py"

_CALLS = (
    Mutant(
        "failed-batch-noted-with-its-answer",
        "A batch overtakes one that failed, while the answer to that waits for another partition.",
        "a request with partitions on streams of different speed",
        """
        streammeta.brokers.kafka.calls.record_calls:
        - item.appended.durable.add_done_callback(partial(_note_failed, broker, item))
        """,
        Tested(f"{_RECORDS}::test_no_batch_overtakes_one_that_failed_beside_a_slow_partition"),
    ),
    Mutant(
        "unknown-topic-not-noted",
        "A batch overtakes one that came before the broker knew the topic.",
        "a producer that is faster than the view",
        """
        streammeta.brokers.kafka.calls.record_calls:
        - (Code.NOT_LEADER_OR_FOLLOWER, Code.UNKNOWN_TOPIC_OR_PARTITION, Code.STORAGE_ERROR)
        + (Code.NOT_LEADER_OR_FOLLOWER, Code.STORAGE_ERROR)
        """,
        Tested(f"{_RECORDS}::test_no_batch_overtakes_one_of_a_topic_that_was_not_known_yet"),
    ),
    Mutant(
        "storage-error-not-noted",
        "A batch overtakes one that the writer did not take.",
        "KAFKA_STORAGE_ERROR, which producers retry",
        """
        streammeta.brokers.kafka.calls.record_calls:
        - (Code.NOT_LEADER_OR_FOLLOWER, Code.UNKNOWN_TOPIC_OR_PARTITION, Code.STORAGE_ERROR)
        + (Code.NOT_LEADER_OR_FOLLOWER, Code.UNKNOWN_TOPIC_OR_PARTITION)
        """,
        Tested(f"{_RECORDS}::test_no_batch_overtakes_one_that_the_writer_refused"),
    ),
    Mutant(
        "long-names-remembered",
        "Refused batches of made-up topics fill the memory of a broker.",
        "names of 32 KiB, ten thousand times",
        """
        streammeta.brokers.kafka.cluster.refused_batches:
        - if len(topic) > TOPIC_MAX:
        + if not topic:
              return None
        """,
        Tested(f"{_RECORDS}::test_a_name_that_no_topic_has_is_not_remembered"),
    ),
    Mutant(
        "plain-batches-held-back",
        "A batch of one client holds back the batches of all others without a producer id.",
        "producer id -1 taken for a producer",
        """
        streammeta.brokers.kafka.cluster.refused_batches:
        - if len(batches) != 1 or batches[0].producer_id < 0:
        + if len(batches) != 1:
              return None
        """,
        Tested(f"{_RECORDS}::test_batches_without_a_producer_id_are_never_held_back"),
    ),
    Mutant(
        "acknowledged-when-time-is-over",
        "A batch that is not durable yet is acknowledged when the time of the request is over.",
        "a timeout that counts as an answer",
        """
        streammeta.brokers.kafka.calls.record_calls:
        - if not item.appended.durable.done():
        -     return Code.REQUEST_TIMED_OUT
        + if not item.appended.durable.done():
        +     return Code.NONE
        """,
        Tested(
            f"{_RECORDS}::test_a_batch_is_acknowledged_when_it_is_durable_and_not_when_time_is_over"
        ),
    ),
    Mutant(
        "unknown-acks-written",
        "A batch with acks that nobody offers is written and refused.",
        "acks checked with the answer",
        """
        streammeta.brokers.kafka.calls.record_calls:
        - _check_acks(body)
          await _admit(broker, item)
        + _check_acks(body)
        """,
        Tested(f"{_RECORDS}::test_acks_0_has_no_answer_and_other_acks_write_nothing"),
    ),
    Mutant(
        "fetch-ignores-max-bytes",
        "One answer has a batch of every partition, however many a request names.",
        "the exception for the first batch, made for all",
        """
        streammeta.brokers.kafka.calls.record_calls:
        - "records": data if is_first or len(data) <= left else b"",
        + "records": data,
        """,
        Tested(f"{_RECORDS}::test_an_answer_has_one_batch_at_least_and_no_more_than_is_asked_for"),
    ),
    Mutant(
        "empty-partition-counts-as-first",
        "A consumer of a small fetch.max.bytes never gets past its first partition that is empty.",
        "KIP-74: the first non-empty partition makes progress",
        """
        streammeta.brokers.kafka.calls.record_calls:
        - row = await _fetch_row(broker, topic.topic, item, left - size, is_first=size == 0)
        + row = await _fetch_row(broker, topic.topic, item, left - size, is_first=not rows)
        """,
        Tested(f"{_RECORDS}::test_an_answer_has_one_batch_at_least_and_no_more_than_is_asked_for"),
    ),
    Mutant(
        "fetch-holds-errors-back",
        "A consumer hears of a partition that moved after its whole max.wait.",
        "min.bytes awaited beside an error",
        """
        streammeta.brokers.kafka.calls.record_calls:
        - if size >= body.min_bytes or has_error:
        + if size >= body.min_bytes:
              break
        """,
        Tested(f"{_RECORDS}::test_an_error_of_a_partition_is_told_at_once"),
    ),
    Mutant(
        "fetch-watches-the-first-partition",
        "A consumer waits for its whole max.wait though another partition has records.",
        "one watcher for many logs",
        """
        streammeta.brokers.kafka.calls.record_calls:
        - for log in _logs(broker, body):
        + for log in _logs(broker, body)[:1]:
        """,
        Tested(f"{_RECORDS}::test_a_fetch_waits_for_its_bytes_and_hears_of_them"),
    ),
    Mutant(
        "delete-all-deletes-nothing",
        "DeleteRecords with -1 is answered and deletes nothing.",
        "the offset -1 taken for one below the start",
        """
        streammeta.brokers.kafka.calls.record_calls:
        - start = await log.trim(log.high_watermark if item.offset == -1 else item.offset)
        + start = await log.trim(log.start_offset if item.offset == -1 else item.offset)
        """,
        Tested(f"{_RECORDS}::test_minus_one_deletes_all_durable_records"),
    ),
    Mutant(
        "old-leader-epoch-answered",
        "A consumer that has seen a newer leader is answered by a former one.",
        "KIP-320 without the check of the current leader epoch",
        """
        streammeta.brokers.kafka.cluster.broker:
        - if leader_epoch > log.epoch:
        + if leader_epoch > log.epoch + 1:
        """,
        Tested(f"{_RECORDS}::test_a_leader_answers_for_its_own_epoch_alone"),
    ),
    Mutant(
        "closed-log-answers-as-leader",
        "A broker that has lost its session goes on answering as leader.",
        "a look at the map of logs, not at the log",
        """
        streammeta.brokers.kafka.cluster.broker:
        - if log is None or not log.is_writable:
        + if log is None:
              raise KafkaError(Code.NOT_LEADER_OR_FOLLOWER)
        """,
        Tested(f"{_RECORDS}::test_a_log_that_was_given_up_is_neither_read_nor_written_nor_trimmed"),
    ),
    Mutant(
        "watchers-not-told-of-the-end",
        "A consumer that waits is not answered when its broker gives the log up.",
        "a flag that nobody is waked for",
        """
        streammeta.brokers.partition.log:
              self._is_closed = True
        - self._notify_watchers()
        """,
        Tested(f"{_RECORDS}::test_a_fetch_that_waits_hears_that_its_broker_leads_no_more"),
    ),
)

_CLUSTER = (
    Mutant(
        "producer-ids-put-unconditionally",
        "Two brokers give out the same producer ids, and batches of one pass for the other's.",
        "a counter read and written without its version",
        """
        streammeta.brokers.kafka.cluster.keys:
          value=_ID.pack(first + PRODUCER_BLOCK),
        - # The version makes the reservation exclusive; the loser of a race reads the key
        - # again.
        - expected_version=found.version,
        + overwrite=True,
        """,
        Tested(f"{_BROKER}::test_no_producer_id_is_given_out_twice"),
    ),
    Mutant(
        "lost-put-counts-as-made",
        "A topic that another broker made with other partitions counts as made here.",
        "a conditional put whose answer nobody compares",
        """
        streammeta.brokers.kafka.cluster.keys:
        - result.error == ERROR_CODE_NONE or result.value == item.value
        + result.error == ERROR_CODE_NONE or result.found
        """,
        Tested(f"{_BROKER}::test_a_topic_is_made_once_and_not_by_a_look"),
    ),
    Mutant(
        "former-process-lives",
        "A partition stays with a process of a node that a newer process has replaced.",
        "liveness by node id alone",
        """
        streammeta.brokers.kafka.cluster.cluster:
        - if alive.get(node) == endpoint.node_epoch
        + if node in alive
        """,
        Tested(f"{_BROKER}::test_only_the_process_that_gave_the_address_lives"),
    ),
    Mutant(
        "bucket-log-closed-without-its-records",
        "Streams of a node with a log in the bucket are closed before its log is uploaded.",
        "a recovery by a broker of another shape",
        """
        streammeta.brokers.kafka.cluster.cluster:
        - if node.HasField("recovered_by") and node.wal_config in ("", NO_LOG):
        + if node.HasField("recovered_by"):
        """,
        Tested(f"{_BROKER}::test_a_node_with_a_log_in_the_bucket_is_not_for_this_shape_to_recover"),
    ),
    Mutant(
        "recovery-ends-at-a-foreign-node",
        "A node that another recovers keeps the streams of all later ones closed to everybody.",
        "a return where the next node is due",
        """
        streammeta.brokers.kafka.cluster.takeover:
        - if answer.error != ERROR_CODE_NONE:
        -     break
        + if answer.error != ERROR_CODE_NONE:
        +     return closed
        """,
        Tested(
            f"{_BROKER}"
            "::test_streams_of_all_pages_and_nodes_are_closed_in_the_name_of_the_recoverer"
        ),
    ),
    Mutant(
        "recovery-does-not-fence",
        "A dead broker's process that wakes up appends to the streams that its recoverer lists.",
        "a listing without failover",
        """
        streammeta.brokers.kafka.cluster.takeover:
        - node=node_message(node), failover=True, recoverer=node_message(own)
        + node=node_message(node), recoverer=node_message(own)
        """,
        Tested(
            f"{_BROKER}"
            "::test_streams_of_all_pages_and_nodes_are_closed_in_the_name_of_the_recoverer"
        ),
    ),
    Mutant(
        "log-kept-under-an-old-epoch",
        "A leader that was appointed again goes on under its old epoch.",
        "leadership compared by node alone",
        """
        streammeta.brokers.kafka.cluster.broker:
        - if topic_and_leader is None or topic_and_leader[1].epoch != log.epoch:
        + if topic_and_leader is None:
        """,
        Tested(f"{_BROKER}::test_a_leader_is_replaced_by_itself_under_another_epoch"),
    ),
    Mutant(
        "lost-log-left-open",
        "The next leader can't open the partition: its streams stay open at the former one.",
        "a log that is dropped from the map alone",
        """
        streammeta.brokers.kafka.cluster.broker:
          log.give_up()
        - await self._close_streams(log)
        """,
        Tested(f"{_BROKER}::test_a_broker_leads_what_it_is_appointed_to_and_gives_up_what_it_lost"),
    ),
    Mutant(
        "abandoned-logs-answer",
        "A broker whose session is over answers its clients as leader until it joins again.",
        "a fenced process that ends its tasks alone",
        """
        streammeta.brokers.kafka.cluster.broker:
          await self._end_tasks()
        - for log in self.logs.values():
        -     log.give_up()
        """,
        Tested(
            f"{_BROKER}"
            "::test_a_replaced_broker_answers_nothing_as_leader_and_leaves_keys_and_streams"
        ),
    ),
    Mutant(
        "used-epoch-not-passed",
        "A partition stays closed after an opening whose answer was lost.",
        "an epoch that is refused for ever",
        """
        streammeta.brokers.kafka.cluster.broker:
          except (StreamFencedError, StreamEpochMismatchError):
        -     await self._next_epoch(place, leader)
        +     self._retry_opening(place)
        """,
        Tested(f"{_BROKER}::test_an_epoch_that_was_used_is_passed"),
    ),
    Mutant(
        "failed-log-opened-under-its-epoch",
        "A log that failed stays closed: its epoch is the one that its streams have.",
        "a reopening without the next epoch",
        """
        streammeta.brokers.kafka.cluster.broker:
          await self._close_streams(failed)
        - await self._next_epoch(place, leader)
          return
        """,
        Tested(f"{_BROKER}::test_a_failed_log_is_opened_again_one_epoch_on_without_what_failed"),
    ),
    Mutant(
        "every-broker-appoints",
        "Brokers with views of different age name leaders against each other.",
        "appointments by whoever sees a vacancy",
        """
        streammeta.brokers.kafka.cluster.broker:
        - if self.view.controller == self.node_id and await self._appoint():
        + if await self._appoint():
        """,
        Tested(f"{_BROKER}::test_only_one_broker_names_leaders"),
    ),
    Mutant(
        "topic-gone-before-its-note",
        "Streams of a deleted topic stay for ever if the broker ends between two keys.",
        "a note written after the deletion",
        """
        streammeta.brokers.kafka.calls.topic_calls:
        - await broker.keys.put({deleted_key(topic.topic_id): note})
          await broker.keys.delete([topic_key(name), *(leader_key(*place) for place in places)])
        + await broker.keys.put({deleted_key(topic.topic_id): note})
        """,
        Tested(f"{_BROKER}::test_a_deletion_is_noted_before_the_topic_goes"),
    ),
    Mutant(
        "living-topic-deleted",
        "The streams of a topic go though its deletion failed half way and it lives.",
        "a note taken for the deletion itself",
        """
        streammeta.brokers.kafka.cluster.deleted_topics:
          noted = await keys.list(deleted_key())
        + living = ()
        """,
        Tested(f"{_BROKER}::test_only_closed_streams_of_deleted_topics_are_deleted"),
    ),
    Mutant(
        "note-goes-with-the-last-stream",
        "A stream that a broker was just making for a deleted topic stays for ever.",
        "a note that is not kept for a while",
        """
        streammeta.brokers.kafka.cluster.deleted_topics:
        - if topic_id not in left and now_ms - value["at_ms"] >= NOTE_KEPT_MS:
        + if topic_id not in left:
        """,
        Tested(f"{_BROKER}::test_a_note_of_a_deletion_goes_after_the_last_stream_and_a_while"),
    ),
    Mutant(
        "topic-grown-over-a-change",
        "A topic loses partitions that another broker added meanwhile.",
        "a read and a write without the version between them",
        """
        streammeta.brokers.kafka.calls.topic_changes:
        - if not await broker.keys.put({key: changed.document()}, expected=topic.version):
        + if not await broker.keys.put({key: changed.document()}):
        """,
        Tested(f"{_BROKER}::test_a_topic_only_grows_and_not_over_a_change_of_another_broker"),
    ),
    Mutant(
        "validation-makes-the-topic",
        "A request that only asks whether a topic could be made makes it.",
        "validate_only, passed over",
        """
        streammeta.brokers.kafka.calls.topic_calls:
        - if not body.validate_only:
        -     await _create(broker, item.name, count, configs)
        + await _create(broker, item.name, count, configs)
        """,
        Tested(f"{_BROKER}::test_a_topic_is_made_once_and_not_by_a_look"),
    ),
)

_GROUPS = (
    Mutant(
        "refused-commit-answered-as-kept",
        "A commit that the keys refuse is answered as kept, and records are read again.",
        "an answer that does not look at the put",
        """
        streammeta.brokers.kafka.groups.group_calls:
        - part["error_code"] = part["error_code"] or refused
        + part["error_code"] = part["error_code"] or Code.NONE
        """,
        Tested(
            f"{_GROUP_CALLS}::test_a_commit_that_is_refused_again_and_again_is_not_answered_as_kept"
        ),
    ),
    Mutant(
        "former-coordinator-commits",
        "A broker that coordinates a group no more keeps offsets for it.",
        "a group taken over again by whoever commits",
        """
        streammeta.brokers.kafka.groups.group_calls:
        - return await offsets.put(values) or None
        + offsets._versions = None
        + return await offsets.put(values) or None
        """,
        Tested(
            f"{_GROUP_CALLS}::test_a_former_coordinator_that_has_not_heard_of_it_commits_nothing"
        ),
    ),
    Mutant(
        "stranger-commits",
        "A consumer that was left out of its group commits offsets of partitions it lost.",
        "commits without the check of the generation",
        """
        streammeta.brokers.kafka.groups.group_calls:
        - if code is Code.NONE:
        -     code = self._group(body.group_id).check_commit(
        + if code is Code.NONE and body.generation_id_or_member_epoch < 0:
        +     code = self._group(body.group_id).check_commit(
        """,
        Tested(f"{_GROUP_CALLS}::test_only_members_of_the_generation_commit"),
    ),
    Mutant(
        "old-versions-kept",
        "The coordinator between two terms of a broker commits after its successor has read.",
        "versions that outlive the term they were read in",
        """
        streammeta.brokers.kafka.groups.group_calls:
        -     del self._offsets[name]
        +     pass
          for name, group in list(self.groups.items()):
        """,
        Tested(
            f"{_GROUP_CALLS}"
            "::test_a_coordinator_that_was_another_meanwhile_forgets_the_versions_it_knew"
        ),
    ),
    Mutant(
        "waiting-members-not-answered",
        "Members wait for a coordinator that is none any more until their requests time out.",
        "groups that are dropped in silence",
        """
        streammeta.brokers.kafka.groups.group_calls:
          del self.groups[name]
        - self._send(group.end(Code.NOT_COORDINATOR))
          continue
        """,
        Tested(f"{_GROUP_CALLS}::test_members_that_wait_hear_that_the_coordinator_is_another"),
    ),
    Mutant(
        "offset-of-an-unknown-partition",
        "Keys of partitions that no topic has fill the map of the controllers.",
        "a commit that trusts its client",
        """
        streammeta.brokers.kafka.groups.group_calls:
        - if known is None or not 0 <= item.partition_index < known.partitions:
        + if known is None:
              return Code.UNKNOWN_TOPIC_OR_PARTITION
        """,
        Tested(
            f"{_GROUP_CALLS}::test_offsets_of_unknown_partitions_and_long_metadata_are_not_kept"
        ),
    ),
)

_CONNECTIONS = (
    Mutant(
        "strangers-served",
        "A client that has not authenticated is served.",
        "a listener with users whose connections are not asked for one",
        """
        streammeta.brokers.kafka.service.server:
        - await self._authenticate(reader, writer)
          await self._serve(reader, writer)
        """,
        Tested(f"{_SERVER}::test_a_stranger_is_served_nothing"),
    ),
    Mutant(
        "large-frames-of-strangers",
        "A client that has not authenticated makes a broker hold 32 MiB.",
        "one bound for all connections",
        """
        streammeta.brokers.kafka.service.server:
        - frame = await reader.readexactly(await _size(reader, UNAUTHENTICATED_FRAME_MAX, 0))
        + frame = await reader.readexactly(await _size(reader, FRAME_MAX, 0))
        """,
        Tested(f"{_SERVER}::test_a_stranger_may_send_small_frames_alone"),
    ),
    Mutant(
        "frames-of-any-size",
        "A client makes a broker hold 2 GiB by one number.",
        "a length that is believed",
        """
        streammeta.brokers.kafka.service.server:
        - if not least <= size <= most:
        + if not least <= size:
        """,
        Tested(f"{_SERVER}::test_a_frame_of_a_size_that_no_request_has_ends_its_connection_unread"),
    ),
    Mutant(
        "memory-of-answered-requests-stays-counted",
        "A broker ends connections at random once it has answered 256 MiB of requests.",
        "bytes that are counted in and not out",
        """
        streammeta.brokers.kafka.service.server:
        - task.add_done_callback(lambda _, size=size: self._release(size))  # type: ignore[misc]
        """,
        Tested(f"{_SERVER}::test_answers_come_in_the_order_of_requests_whichever_is_ready_first"),
    ),
    Mutant(
        "memory-of-failed-requests-stays-counted",
        "A broker ends connections at random once 256 MiB of requests have failed.",
        "a release on one of two ends",
        """
        streammeta.brokers.kafka.service.server:
          except BaseException:
        -     self._request_memory -= size
              raise
        """,
        Tested(f"{_SERVER}::test_a_call_that_fails_unforeseen_ends_its_own_connection"),
    ),
    Mutant(
        "calls-outlive-their-connection",
        "Fetches of clients that are gone wait on, each with its watchers.",
        "a queue that is dropped and not cancelled",
        """
        streammeta.brokers.kafka.service.server:
          while not answers.empty():
        -     answers.get_nowait().task.cancel()
        +     answers.get_nowait()
        """,
        Tested(f"{_SERVER}::test_calls_of_a_connection_that_ends_are_given_up"),
    ),
    Mutant(
        "former-password-remembered",
        "A password that was replaced lets in whoever used it before.",
        "a cache of passwords that outlives the file's line",
        """
        streammeta.brokers.kafka.service.users:
        - if known is not None and known[0] == entry and hmac.compare_digest(known[1], seal):
        + if known is not None and hmac.compare_digest(known[1], seal):
        """,
        Tested(f"{_USERS}::test_file_counts_as_it_is_now"),
    ),
    Mutant(
        "acting-for-another",
        "A user acts for another by PLAIN's first field.",
        "an authorization id that nobody compares",
        """
        streammeta.brokers.kafka.service.authentication:
        - if acting_as not in ("", name) or not name or not password:
        + if not name or not password:
        """,
        Tested(f"{_USERS}::test_message_of_plain_has_a_name_and_a_password"),
    ),
)

KAFKA = (*_CALLS, *_CLUSTER, *_GROUPS, *_CONNECTIONS)
