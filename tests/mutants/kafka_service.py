"""Mutants of how the Kafka-shaped broker serves its clients: answers, sessions, administration."""

from tests.mutants.mutant import Mutant, Tested

_ADMIN = "tests/brokers/test_kafka_administration.py"
_ELEMENTS = "tests/brokers/test_kafka_request_elements.py"
_ENDINGS = "tests/brokers/test_kafka_endings.py"
_FAILOVER = "tests/lifecycle/test_lifecycle_failover.py"
_METADATA = "tests/brokers/test_kafka_metadata.py"
_RECORDS = "tests/brokers/test_kafka_record_calls.py"
_VIEW = "tests/brokers/test_kafka_view.py"
_OFFSETS = "tests/brokers/test_group_offsets.py"

_FENCES = (
    Mutant(
        "first-offset-without-the-fence",
        "A former coordinator answers that the first offset of a partition is committed.",
        "a key that has no version yet, so that no version refuses it",
        """
        streammeta.brokers.kafka.groups.group_offsets:
        - if not values.keys() <= known.keys() and not await self._holds_fence():
        -     return False
        """,
        Tested(f"{_OFFSETS}::test_a_former_coordinator_commits_no_first_offset_of_a_partition"),
    ),
    Mutant(
        "late-first-offset-counts",
        "A consumer skips to an offset that a former coordinator stored after the takeover.",
        "a refused commit whose key is in the map",
        """
        streammeta.brokers.kafka.groups.group_offsets:
        - counting = {k: value for k, (value, _) in listed.items() if _counts(value, self._term)}
        + counting = {k: value for k, (value, _) in listed.items()}
        """,
        Tested(f"{_OFFSETS}::test_a_first_offset_that_came_too_late_never_counts"),
    ),
    Mutant(
        "halfway-takeover-counts-as-completed",
        "Offsets are gone after a broker ended while it took the group over.",
        "a fence that claims at its begin that all offsets have the new term",
        """
        streammeta.brokers.kafka.groups.group_offsets:
        - completed = fence.get(_COMPLETED, 0)
        + completed = version
        """,
        Tested(f"{_OFFSETS}::test_a_first_offset_counts_if_it_came_before_the_successor_listed"),
    ),
)

_ELEMENTS_OF_REQUESTS = (
    Mutant(
        "lists-in-lists-uncounted",
        "A list in a list of a request holds up the event loop of a broker.",
        "a bound on the outer list alone",
        """
        streammeta.brokers.kafka.protocol.request_elements:
          def skip(frame: bytes, at: int, count: _Count) -> int:
              length, at = _length(read_length(frame, at), at)
        -     count.charge(length)
              return at + length * size
        """,
        Tested(f"{_ELEMENTS}::test_lists_beyond_the_bound_are_refused_before_they_are_read"),
    ),
    Mutant(
        "tags-uncounted",
        "Millions of tags of a request hold up the event loop of a broker.",
        "fields that nobody knows, and that are skipped one by one",
        """
        streammeta.brokers.kafka.protocol.request_elements:
        - count.charge(number)
        """,
        Tested(f"{_ELEMENTS}::test_lists_beyond_the_bound_are_refused_before_they_are_read"),
    ),
    Mutant(
        "list-charged-after-its-walk",
        "Counting the elements of a request takes as long as reading them did.",
        "a list that is walked before it is charged",
        """
        streammeta.brokers.kafka.protocol.request_elements:
        - count.charge(length)
          for _ in range(length):
              at = skip_item(frame, at, count)
        + count.charge(length)
          return at
        """,
        Tested(f"{_ELEMENTS}::test_count_ends_at_the_bound"),
    ),
    Mutant(
        "elements-without-memory",
        "Waiting fetches of small frames hold many times the memory that the broker allows.",
        "memory that counts the bytes of frames alone",
        """
        streammeta.brokers.kafka.service.server:
        - size += self._reserve(request.elements * ELEMENT_BYTES)
        """,
        Tested(f"{_ELEMENTS}::test_elements_hold_memory_until_the_answer"),
    ),
    Mutant(
        "names-multiply-rows",
        "A topic that is named a thousand times is answered with a thousand times its partitions.",
        "work that the elements of a request multiply",
        """
        streammeta.brokers.kafka.calls.topic_calls:
        - named = list(dict.fromkeys(asked.name for asked in body.topics if asked.name is not None))
        + named = [asked.name for asked in body.topics if asked.name is not None]
        """,
        Tested(f"{_METADATA}::test_names_and_ids_do_not_multiply_the_work_of_a_request"),
    ),
    Mutant(
        "large-answers-on-the-loop",
        "An answer with ten thousand rows holds up the event loop of a broker.",
        "a bound on what is read, and none on what is written",
        """
        streammeta.brokers.kafka.service.server:
        - if request.elements + rows <= LOOP_ROWS_MAX:
        + if True:
              return write_response(request, tree)
        """,
        Tested(f"{_ELEMENTS}::test_large_answers_are_written_beside_the_event_loop"),
    ),
    Mutant(
        "fetch-without-a-pause",
        "A Fetch of ten thousand partitions without news holds up the event loop of a broker.",
        "awaits that never wait",
        """
        streammeta.brokers.kafka.calls.record_calls:
        - await asyncio.sleep(0)  # reading an unchanged partition never yields
        + pass
        """,
        Tested(f"{_ELEMENTS}::test_fetch_of_many_partitions_takes_several_turns"),
    ),
    Mutant(
        "turns-without-a-sum",
        "Requests of many connections together hold up the event loop of a broker.",
        "a bound for each request, and none for all of one turn",
        """
        streammeta.brokers.kafka.protocol.request_turns:
        - self._begun += work
        """,
        Tested(
            f"{_ELEMENTS}::test_turn_of_the_event_loop_begins_bounded_work_over_all_connections"
        ),
    ),
)

_ANSWERS = (
    Mutant(
        "lost-batch-without-answer-ignored",
        "Records that a producer sends with acks=0 vanish, and its connection stays.",
        "no answer taken for nothing to say",
        """
        streammeta.brokers.kafka.calls.record_calls:
          if body.acks == 0:
        -     _require_stored(items)
              return None
        """,
        Tested(
            f"{_RECORDS}::test_a_batch_without_an_answer_that_is_lost_later_ends_its_connection"
        ),
    ),
    Mutant(
        "metadata-fails-with-its-controllers",
        "Clients lose their connections while no controller answers, though brokers are known.",
        "an error of the controllers taken for a defect of the request",
        """
        streammeta.brokers.kafka.calls.topic_calls:
        - except (BrokerClientError, TimeoutError) as error:
        + except TimeoutError as error:
              _log.warning("looking up %d topics failed: %s", len(names), error or "timeout")
        """,
        Tested(
            f"{_METADATA}::test_metadata_is_answered_from_the_last_view_while_controllers_are_gone"
        ),
    ),
    Mutant(
        "new-topic-answered-without-leader",
        "A client takes a new topic for one without leaders, and does not ask again for minutes.",
        "kafka-python, whose metadata is 300 s old before it looks again",
        """
        streammeta.brokers.kafka.calls.topic_calls:
        - await _wait_for_leaders(broker, [*absent, *filter(partial(_is_new, broker), names)])
        """,
        Tested(f"{_METADATA}::test_metadata_waits_for_the_leader_of_a_topic_that_it_creates"),
    ),
    Mutant(
        "reading-stopped-by-its-caller",
        "Streams of a partition stay open at a broker that does not lead it any more.",
        "a deadline of one request that cancels what all of them need",
        """
        streammeta.brokers.kafka.cluster.broker:
        - await asyncio.shield(self._next_refresh)
        + await self._next_refresh
        """,
        Tested(f"{_METADATA}::test_a_caller_that_gives_up_does_not_stop_the_reading"),
    ),
)

_REQUESTS = (
    Mutant(
        "padded-metadata-refused",
        "librdkafka loses its connection whenever it asks for all topics.",
        "a length of four bytes for an absent array, which Apache Kafka accepts",
        """
        streammeta.brokers.kafka.protocol.wire:
        - if over and not (_is_padded(api_key, version, body) and over == _PADDING):
        + if over:
        """,
        Tested(f"{_VIEW}::test_all_topics_are_asked_for_as_librdkafka_does"),
    ),
)

_SESSIONS = (
    Mutant(
        "streams-released-to-nobody",
        "A broker that only lost time loses its partitions, though nobody could take them over.",
        "24 fencings in six minutes on a busy machine",
        """
        streammeta.controller.lifecycle.failover:
        - if not has_successor(nodes, self._sessions):
        -     return nodes
        """,
        Tested(f"{_FAILOVER}::test_a_node_keeps_its_streams_while_nobody_could_open_them"),
    ),
    Mutant(
        "streams-kept-from-a-successor",
        "Partitions of a dead broker stay closed to the brokers that live.",
        "a broker that is spared though another is there",
        """
        streammeta.controller.lifecycle.failover:
        - if not has_successor(nodes, self._sessions):
        + if self._sessions:
              return nodes
        """,
        Tested(f"{_FAILOVER}::test_a_fenced_node_loses_its_streams_once_another_could_open_them"),
    ),
    Mutant(
        "silent-broker-gives-itself-up",
        "A broker that wakes up closes all its partitions before its heartbeat is answered.",
        "a view in which a broker does not find itself",
        """
        streammeta.brokers.kafka.cluster.cluster:
        - and (node.state not in _GONE or NodeIdentity(node.node_id, node.node_epoch) == own)
        + and node.state not in _GONE
        """,
        Tested(f"{_ENDINGS}::test_a_broker_that_was_silent_keeps_what_nobody_took_over"),
    ),
    Mutant(
        "released-process-resumes",
        "A process whose streams were released goes on as if it led their partitions.",
        "an exception for the own node that is made for every state of it",
        """
        streammeta.brokers.kafka.cluster.cluster:
        - if not (node.failover or node.departed)
        + if not node.departed
        """,
        Tested(f"{_ENDINGS}::test_a_process_that_was_released_or_replaced_does_not_resume"),
    ),
    Mutant(
        "uncommitted-records-not-named",
        "A broker ends without its controllers and does not say what it leaves.",
        "an end that looks like one in good order",
        """
        streammeta.brokers.kafka.cluster.broker:
        - lost = log.end_offset - log.high_watermark
        + lost = 0
        """,
        Tested(
            f"{_ENDINGS}"
            "::test_a_broker_ends_without_its_controllers_and_names_what_is_not_committed"
        ),
    ),
)

_ADMINISTRATION = (
    Mutant(
        "altered-settings-not-applied",
        "A setting that was altered counts when the partition is opened again, and not before.",
        "settings that are read when a log is opened",
        """
        streammeta.brokers.kafka.cluster.broker:
          await self._close_lost()
        - self._configure()
        """,
        Tested(f"{_ADMIN}::test_altered_settings_count_for_logs_that_are_open"),
    ),
    Mutant(
        "other-settings-reset",
        "A change of one setting resets all others.",
        "IncrementalAlterConfigs done as AlterConfigs",
        """
        streammeta.brokers.kafka.calls.config_calls:
        - values = dict(topic.configs)
        + values: dict[str, str] = {}
          for config in configs:
        """,
        Tested(f"{_ADMIN}::test_single_settings_are_set_and_deleted"),
    ),
    Mutant(
        "compaction-kept-as-harmless",
        "A topic that is to be compacted by key is accepted, and its old keys are deleted by time.",
        "all of Kafka's settings taken for harmless",
        """
        streammeta.brokers.kafka.cluster.topic_configs:
        - if value != DEFAULTS[name]:
        + if not value:
        """,
        Tested(f"{_ADMIN}::test_what_kafka_does_not_know_or_would_need_more_is_refused"),
    ),
    Mutant(
        "group-in-use-deleted",
        "The offsets of consumers that read go, and they begin again.",
        "a deletion that does not look at members",
        """
        streammeta.brokers.kafka.groups.group_calls:
        - if code is Code.NONE and self._has_members(name):
        -     code = Code.NON_EMPTY_GROUP
        """,
        Tested(f"{_ADMIN}::test_a_group_with_members_is_not_deleted"),
    ),
    Mutant(
        "former-coordinator-deletes",
        "A broker that coordinates a group no more deletes its offsets.",
        "a deletion without the versions of the keys",
        """
        streammeta.brokers.kafka.groups.group_offsets:
        - if not await self._keys.delete_at(gone) or not await self._holds_fence():
        + await self._keys.delete_at({k: at for k, (_, at) in (await self._keys.list("")).items()})
        + if self._versions:
              return None
        """,
        Tested(f"{_OFFSETS}::test_a_former_coordinator_deletes_nothing"),
    ),
)

KAFKA_SERVICE = (
    *_FENCES,
    *_ELEMENTS_OF_REQUESTS,
    *_ANSWERS,
    *_REQUESTS,
    *_SESSIONS,
    *_ADMINISTRATION,
)
