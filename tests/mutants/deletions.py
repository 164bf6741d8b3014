"""Mutants of deletion, by the leader and by reconciliation: too much, too early, too little."""

from tests.mutants.mutant import Mutant, Tested

_LEADER = "tests/lifecycle/test_lifecycle_deletion.py"

DELETIONS = (
    Mutant(
        "refused-keys-before-all-others",
        "A key that fails every request is tried again and again, and no other key is.",
        "found by a test: it was the only key for a while, so the bucket seemed to be down",
        """
        streammeta.controller.lifecycle.deletion:
        - if self._store_failures and self._rng.random() < _FRESH_FIRST:
        + if False:
        """,
        Tested(f"{_LEADER}::test_keys_that_fail_every_request_hold_up_none_that_come_later"),
    ),
    Mutant(
        "oldest-key-first-for-ever",
        "The oldest key fails every request, and the keys behind it are never tried.",
        "queues that are worked on in order",
        """
        streammeta.controller.lifecycle.deletion:
        - if self._store_failures:
        -     self._rng.shuffle(found)
          return found
        """,
        Tested(f"{_LEADER}::test_keys_that_fail_every_request_hold_up_none_that_come_later"),
    ),
    Mutant(
        "first-failure-refuses-nothing",
        "A key that fails the request it is in is never found out.",
        "a failure of a request that is taken for one of the bucket",
        """
        streammeta.controller.lifecycle.deletion:
        - elif self._store_failures == 0:
        + elif False:
        """,
        Tested(
            f"{_LEADER}::test_a_key_that_fails_requests_is_stuck_visibly_though_others_are_deleted"
        ),
    ),
    Mutant(
        "retries-take-all-requests",
        "Slow requests for keys that were refused leave none for the others.",
        "one pool for first attempts and retries",
        """
        streammeta.controller.lifecycle.deletion:
        - if self._retry_requests >= RETRIES_IN_FLIGHT_MAX:
        + if self._retry_requests >= IN_FLIGHT_MAX:
        """,
        Tested(f"{_LEADER}::test_refused_keys_whose_requests_are_slow_hold_up_no_other"),
    ),
    Mutant(
        "throttled-is-refused",
        "Keys that a busy store puts off count as refused, and become stuck.",
        "SlowDown in the errors of single keys",
        """
        streammeta.controller.lifecycle.deletion:
        - refused = {key: why for key, why in result.failed.items() if key not in result.throttled}
        + refused = dict(result.failed)
        """,
        Tested(f"{_LEADER}::test_a_throttled_key_is_no_refused_one_and_a_refused_one_beside_it_is"),
    ),
    Mutant(
        "refused-counts-as-throttled",
        "A key that is refused beside one that is throttled never becomes stuck.",
        "one verdict for all failures of an answer",
        """
        streammeta.controller.lifecycle.deletion:
        - refused = {key: why for key, why in result.failed.items() if key not in result.throttled}
        + refused = {} if result.throttled else dict(result.failed)
        """,
        Tested(f"{_LEADER}::test_a_throttled_key_is_no_refused_one_and_a_refused_one_beside_it_is"),
    ),
    Mutant(
        "deleted-in-a-bucket-of-doubt",
        "The leader deletes in a bucket that may be another cluster's.",
        "a check at the start alone",
        """
        streammeta.controller.lifecycle.deletion:
        - if not self._may_delete():
        + if False:
        """,
        Tested(f"{_LEADER}::test_nothing_is_deleted_while_the_bucket_may_be_another_s"),
    ),
    Mutant(
        "deleted-before-the-mark-is-committed",
        "Bytes go by a mark that another leader may never see.",
        "side effects of entries that are only appended",
        """
        streammeta.controller.lifecycle.deletion:
        - await self._controller.settled()
          await self._delete_settled(object_ids)
        """,
        Tested(f"{_LEADER}::test_no_bytes_go_before_their_mark_is_committed"),
    ),
    Mutant(
        "one-bad-key-spoils-its-company",
        "A key that causes whole requests to be refused is always tried along with others.",
        "retries in batches that never get smaller",
        """
        streammeta.controller.lifecycle.deletion_pace:
        - limit = min(limit, max(1, limit >> count)) if not taken else limit
        """,
        Tested(f"{_LEADER}::test_the_more_often_keys_were_refused_the_fewer_are_tried_together"),
    ),
)
