"""Mutants of the ways through outages: search for the leader, retries of the store, tails."""

from tests.mutants.mutant import Mutant, Tested

_SCHEDULES = "tests/rpc/test_router_schedules.py::"

OUTAGES = (
    Mutant(
        "suspicion-of-a-leader-never-ends",
        "A leader that failed once is suspected until the quorum epoch grows.",
        "two brokers cut off for 24 minutes by one slow answer, with every gauge healthy",
        """
        streammeta.rpc.leader_router:
        - if suspicion is None or self._ignores_suspicions(failures):
        + if suspicion is None:
              return False
        - return self._clock() < suspicion.ends_at
        + return True
        """,
        Tested(_SCHEDULES + "test_a_leader_that_failed_once_is_followed_again_without_an_election"),
    ),
    Mutant(
        "learned-endpoints-not-in-the-rotation",
        "A client only ever rotates among the endpoints that it was given.",
        "the leader is not among the endpoints given, and no follower names it",
        """
        streammeta.rpc.leader_router:
        - self._known = (*self._endpoints, *learned[-LEARNED_MAX:])
        + self._known = self._endpoints
        """,
        Tested(_SCHEDULES + "test_learned_controllers_join_the_rotation"),
    ),
    Mutant(
        "hints-obeyed-without-a-bound",
        "Two controllers that name each other keep a call from all others.",
        "redirect loops between stale followers",
        """
        streammeta.rpc.leader_router:
        - if hinted is not None and failures % LOOK_ROUND_OF_HINTS:
        + if hinted is not None:
        """,
        Tested(_SCHEDULES + "test_two_controllers_that_name_each_other_do_not_hide_a_third"),
    ),
    Mutant(
        "epoch-relied-on-for-ever",
        "Hints of a restored cluster, whose epochs begin at 1, are outdated for ever.",
        "a client that outlives the cluster's restore",
        """
        streammeta.rpc.leader_router:
        - return hint.epoch < self._epoch and is_recent and not self._ignores_suspicions(failures)
        + return hint.epoch < self._epoch
        """,
        Tested(
            _SCHEDULES + "test_the_first_epochs_of_a_restored_cluster_are_believed_after_a_while"
        ),
    ),
    Mutant(
        "suspect-probed-by-all",
        "When a suspicion ends all calls go to a controller that may still hang.",
        "a circuit breaker without a half-open state",
        """
        streammeta.rpc.leader_router:
        - return self._probe(hint.endpoint)
        + pass
        """,
        Tested(_SCHEDULES + "test_a_suspect_is_probed_by_one_call_and_not_by_all"),
    ),
    Mutant(
        "short-calls-prove-nothing",
        "Callers with less time than an attempt ask a leader that hangs again and again.",
        "heartbeats with a deadline of a second at a stopped process",
        """
        streammeta.rpc.leader_router:
        - if self._waited_s[endpoint] >= GIVEN_UP_S_MAX:
        + if self._waited_s[endpoint] < 0:
        """,
        Tested(
            _SCHEDULES
            + "test_a_leader_that_hangs_is_left_although_no_caller_waits_for_a_whole_attempt"
        ),
    ),
    Mutant(
        "silent-leader-not-shown",
        "A Kafka broker is ready although the leading controller answers none of its calls.",
        "24 minutes without service while each gauge and probe was healthy",
        """
        streammeta.brokers.kafka.service.state:
        - if self.leader_silent_s > LEADER_SILENT_MAX_S:
        + if self.leader_silent_s < 0:
        """,
        Tested(
            "tests/brokers/test_kafka_metrics.py::"
            "test_a_broker_whose_leader_is_silent_is_not_ready_although_its_view_is_fresh"
        ),
    ),
    Mutant(
        "refused-credentials-are-final",
        "A skewed clock or rotated keys end logs and streams for good.",
        "5 s of 403 ended a log in the bucket until the process restarted",
        """
        streammeta.storage.errors:
          The error may pass: a clock is corrected, keys are rotated, a policy is fixed.
          \"\"\"
        -
        - may_pass = True
        """,
        Tested("tests/broker_client/test_object_log.py::test_a_failure_that_passes_ends_no_log"),
    ),
    Mutant(
        "retry-after-believed-without-a-bound",
        "A store that names a day is not asked again for a day, or fails the call at once.",
        "a proxy's wrong Retry-After of 86400",
        """
        streammeta.storage.object_store.protocol.patience:
        - return min(error.retry_after_s or 0.0, RETRY_AFTER_S_MAX)
        + return error.retry_after_s or 0.0
        """,
        Tested(
            "tests/storage/test_storage_retry.py::"
            "test_a_store_that_asks_for_a_day_is_asked_again_within_the_bound_and_the_deadline"
        ),
    ),
    Mutant(
        "uploads-have-no-deadline-of-their-own",
        "An upload under the default durability is tried once, while its commit has a minute.",
        "3 s of 500 failed the streams of a batch",
        """
        streammeta.client.writing.uploader:
        - limit_s = math.inf if self._is_persistent else self._config.commit_deadline_s
        + limit_s = math.inf if self._is_persistent else 0.0
        """,
        Tested(
            "tests/broker_client/test_writer.py::test_a_store_that_fails_for_a_while_fails_no_stream"
        ),
    ),
    Mutant(
        "permanent-refusals-repeated",
        "A bucket that is gone is asked until the deadline.",
        "a policy by deadline alone",
        """
        streammeta.storage.object_store.protocol.patience:
        - if not error.may_pass or left_s <= 0:
        + if left_s <= 0:
        """,
        Tested("tests/storage/test_storage_patience.py::test_what_does_not_pass_is_not_repeated"),
    ),
    Mutant(
        "credentials-read-once",
        "A file of credentials is read at the start alone, so that rotation ends the process.",
        "keys mounted from a secret that is rotated",
        """
        streammeta.storage.object_store.s3.s3:
          if isinstance(failure, AccessDeniedError):
        -     self._connection.renew()
        +     pass
        """,
        Tested(
            "tests/storage/test_storage_s3_store.py::"
            "test_credentials_that_were_refused_are_read_again_from_their_file"
        ),
    ),
    Mutant(
        "set-aside-tried-once",
        "One failed write of records that can't be committed ends the trimming of the log.",
        "a log that fills up until the process restarts",
        """
        streammeta.client.writing.wal_acks:
        - if wait is None:
        + if attempt >= 0:
              raise
        """,
        Tested(
            "tests/broker_client/test_writer_log.py::"
            "test_a_store_that_fails_for_a_while_does_not_end_trimming"
        ),
    ),
    Mutant(
        "tail-ends-with-an-outage",
        "A tail ends when no controller has led for 30 s, while appends go on afterwards.",
        "a background consumer that stops without a word",
        """
        streammeta.client.reading.metadata_follower:
        - return isinstance(error, ControllerUnavailableError | ReadDeadlineError)
        + return False
        """,
        Tested(
            "tests/broker_client/test_reading_tail.py::"
            "test_a_tail_waits_for_controllers_and_reads_on_where_it_was"
        ),
    ),
    Mutant(
        "tail-ends-with-a-refusal-that-passes",
        "A tail ends when the store has refused longer than one read may take.",
        "keys that are rotated while a consumer waits",
        """
        streammeta.client.reading.metadata_follower:
        - return error.may_pass
        + return False
        """,
        Tested(
            "tests/broker_client/test_reading_tail.py::"
            "test_a_tail_waits_for_a_store_that_fails_longer_than_a_read_may"
        ),
    ),
    Mutant(
        "tail-waits-out-what-does-not-pass",
        "A tail of a bucket that is another cluster's waits for ever.",
        "a loop around every error",
        """
        streammeta.client.reading.metadata_follower:
        - if not _may_pass(error):
        + if isinstance(error, str):
        """,
        Tested(
            "tests/broker_client/test_reading_tail.py::"
            "test_a_failure_that_does_not_pass_ends_a_tail"
        ),
    ),
    Mutant(
        "heartbeats-end-with-a-defect",
        "An unexpected error ends the heartbeats without a word, and the node is fenced.",
        "a background task whose exception nobody retrieves",
        """
        streammeta.client.nodes.session:
        - except Exception:  # noqa: BLE001 - without heartbeats the node is fenced
        + except ZeroDivisionError:
        """,
        Tested(
            "tests/broker_client/test_refused_for_now.py::"
            "test_one_that_does_not_get_through_is_not_the_last"
        ),
    ),
    Mutant(
        "store-threads-joined-at-the-end",
        "The end of a process waits for calls of a closed client to a store that never answers.",
        "two brokers that hung for minutes after close() had returned",
        """
        streammeta.client.resources.daemon_threads:
        - thread = threading.Thread(target=_run_calls, args=(work,), name=name, daemon=True)
        + thread = threading.Thread(target=_run_calls, args=(work,), name=name)
        """,
        Tested(
            "tests/broker_client/test_closing_process.py::"
            "test_the_end_of_the_interpreter_waits_for_no_thread_of_a_store"
        ),
    ),
    Mutant(
        "marker-read-in-a-thread-that-is-joined",
        "A look at the bucket's marker that is never answered keeps asyncio.run from returning.",
        "asyncio.to_thread for calls that may hang",
        """
        streammeta.client.controllers.bucket_check:
        - return await run_blocking(read_marker, store, self._namespace)
        + return await asyncio.to_thread(read_marker, store, self._namespace)
        """,
        Tested(
            "tests/broker_client/test_closing_process.py::"
            "test_no_call_of_a_client_runs_where_asyncio_waits_for_it"
        ),
    ),
)
