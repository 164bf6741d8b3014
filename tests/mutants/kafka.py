"""Mutants of the Kafka-shaped broker around its logs: calls, leadership, groups, topics, users."""

from tests.mutants.mutant import Mutant, Tested

_RECORDS = "tests/brokers/test_kafka_record_calls.py"

_CALLS = (
    Mutant(
        "failed-batch-noted-with-its-answer",
        "A batch overtakes one that failed, while the answer to that waits for another partition.",
        "a request with partitions on streams of different speed",
        """
        streammeta.brokers.kafka.record_calls:
        - one.appended.durable.add_done_callback(lambda durable: _note_failed(broker, one, durable))
        """,
        Tested(f"{_RECORDS}::test_no_batch_overtakes_one_that_failed_beside_a_slow_partition"),
    ),
    Mutant(
        "unknown-topic-not-noted",
        "A batch overtakes one that came before the broker knew the topic.",
        "a producer that is faster than the view",
        """
        streammeta.brokers.kafka.record_calls:
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
        streammeta.brokers.kafka.record_calls:
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
        streammeta.brokers.kafka.refused_batches:
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
        streammeta.brokers.kafka.refused_batches:
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
        streammeta.brokers.kafka.record_calls:
        - if not one.appended.durable.done():
        -     return Code.REQUEST_TIMED_OUT
        + if not one.appended.durable.done():
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
        streammeta.brokers.kafka.record_calls:
        - _check_acks(body)
          await _admit(broker, one)
        + _check_acks(body)
        """,
        Tested(f"{_RECORDS}::test_acks_0_has_no_answer_and_other_acks_write_nothing"),
    ),
    Mutant(
        "fetch-ignores-max-bytes",
        "One answer has a batch of every partition, however many a request names.",
        "the exception for the first batch, made for all",
        """
        streammeta.brokers.kafka.record_calls:
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
        streammeta.brokers.kafka.record_calls:
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
        streammeta.brokers.kafka.record_calls:
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
        streammeta.brokers.kafka.record_calls:
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
        streammeta.brokers.kafka.record_calls:
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
        streammeta.brokers.kafka.broker:
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
        streammeta.brokers.kafka.broker:
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
        - self._tell_watchers()
        """,
        Tested(f"{_RECORDS}::test_a_fetch_that_waits_hears_that_its_broker_leads_no_more"),
    ),
)

KAFKA = (*_CALLS,)
