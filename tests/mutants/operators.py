"""Mutants of what operators and newcomers rely on: restarts, alarms, errors, identities."""

from tests.mutants.mutant import Mutant, Tested

_DEV = "tests/cli/test_cli_dev.py"
_NEW = "tests/broker_client/test_newcomers.py"
_TLS = "tests/backup/test_restore_tls.py"
_COMPACTION = "tests/compaction/test_background_compaction.py"
_SILENT = "tests/monitoring/test_silent_brokers.py"
_SESSIONS = "tests/lifecycle/test_lifecycle_sessions.py"

OPERATORS = (
    Mutant(
        "debt-of-uploads-without-bound",
        "Reads are slow for an hour after an hour of uploads beyond the rate.",
        "token buckets whose forced takes know no floor",
        """
        streammeta.client.resources.bandwidth:
        - self._free_at = min(self._free_at, most_ahead)
        """,
        Tested(f"{_COMPACTION}::test_uploads_beyond_the_rate_hold_up_others_for_a_bounded_time"),
    ),
    Mutant(
        "given-up-batches-close-cleanly",
        "No alarm names a broker that ended with batches that it had not committed.",
        "a look for unfinished work after its tasks were awaited",
        """
        streammeta.client.writing.writer:
        - is_clean = not self._in_flight and self._rejection is None
        + is_clean = self._rejection is None
        """,
        Tested(
            "tests/broker_client/test_wal_recovery.py"
            "::test_a_close_that_gives_up_batches_does_not_say_that_it_is_clean"
        ),
    ),
    Mutant(
        "restarts-without-a-bound",
        "A controller that can't start is started again ever more rarely, for hours in the end.",
        "supervisors whose backoff has no bound",
        """
        streammeta.cli.local.restarting:
        - restart.delay_s = min(2 * restart.delay_s, DELAY_MAX_S)
        + restart.delay_s = 2 * restart.delay_s
        """,
        Tested(
            f"{_DEV}::test_restarts_of_a_controller_that_keeps_ending_are_delayed_up_to_a_bound"
        ),
    ),
    Mutant(
        "former-identity-kept",
        "A certificate of the former cluster is accepted as another caller than the same one here.",
        "deny lists and quotas that compare names, and aliases that pass them",
        """
        streammeta.tls.identity:
        - return replace(principal, cluster_id=self.own)
        + return principal
        """,
        Tested(f"{_TLS}::test_a_caller_of_the_former_cluster_is_one_of_this_cluster"),
    ),
    Mutant(
        "any-cluster-is-the-former-one",
        "A restored cluster accepts the certificates of every cluster of its authority.",
        "trust in an authority alone",
        """
        streammeta.tls.identity:
        - if principal.cluster_id not in (self.own, self.former):
        + if self.former is None and principal.cluster_id != self.own:
        """,
        Tested(f"{_TLS}::test_a_caller_of_the_former_cluster_is_one_of_this_cluster"),
    ),
    Mutant(
        "closed-for-good",
        "A broker that closed once raises no alarm when it is lost later.",
        "a flag that is set and never cleared",
        """
        streammeta.controller.lifecycle.broker_sessions:
        - session.has_closed = closes
        + session.has_closed = session.has_closed or closes
        """,
        Tested(f"{_SESSIONS}::test_a_node_that_closed_is_fenced_as_any_other_and_told_apart"),
    ),
    Mutant(
        "alarm-for-a-clean-close",
        "A broker that closed in good order is reported as silent.",
        "pagers that ring for each deployment",
        """
        streammeta.controller.monitoring.status.status:
        - if session_of(node, known.view) != "fenced" or heard is None or heard.has_closed:
        + if session_of(node, known.view) != "fenced" or heard is None:
        """,
        Tested(f"{_SILENT}::test_a_broker_that_nobody_waits_for_raises_no_alarm"),
    ),
    Mutant(
        "client-hangs-after-a-fork",
        "A client in a forked process waits for threads that are in the parent alone.",
        "gRPC under multiprocessing's fork",
        """
        streammeta.client.resources.fork_check:
        - _is_forked = _is_forked or _has_connected
        + _is_forked = False
        """,
        Tested(f"{_NEW}::test_calls_and_store_requests_are_refused_in_a_forked_process"),
    ),
    Mutant(
        "uploads-wait-for-compaction",
        "An upload waits until the traffic of compaction has passed.",
        "one rate limiter for the foreground and the background",
        """
        streammeta.client.resources.bandwidth:
        - if grade is Grade.UPLOAD:
        + if grade is Grade.UPLOAD and self._free_at <= self._time():
        """,
        Tested(f"{_COMPACTION}::test_uploads_never_wait_and_reads_wait_behind_them"),
    ),
    Mutant(
        "compaction-starves",
        "Compaction waits for as long as the others take the whole rate, and objects pile up.",
        "priorities without a least share",
        """
        streammeta.client.resources.bandwidth:
        - while (left_s := ends_at - self._time()) > 0:
        + while (left_s := 1 + abs(ends_at - self._time())) > 0:
        """,
        Tested(f"{_COMPACTION}::test_compaction_goes_on_at_its_least_share_while_others_take_all"),
    ),
    Mutant(
        "one-failure-ends-the-compaction",
        "A cycle that meets a defect is the last one of the process.",
        "background threads that die in silence",
        """
        streammeta.client.api.background_compaction:
        - _log.exception("compaction failed unexpectedly, retrying in %g s", self._interval_s)
        + return False
        """,
        Tested(f"{_COMPACTION}::test_a_failure_does_not_end_it"),
    ),
)
