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
        - if suspicion is None or self._is_long_search(failures):
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
        - return hint.epoch < self._epoch and is_recent and not self._is_long_search(failures)
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
        streammeta.brokers.kafka.state:
        - if self.leader_silent_s > LEADER_SILENT_MAX_S:
        + if self.leader_silent_s < 0:
        """,
        Tested(
            "tests/brokers/test_kafka_metrics.py::"
            "test_a_broker_whose_leader_is_silent_is_not_ready_although_its_view_is_fresh"
        ),
    ),
)
