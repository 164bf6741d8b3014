"""Mutants of fences of brokers: epochs of processes and streams, registrations, releases."""

from tests.mutants.mutant import Mutant, Tested

_REOPENED = "tests/metadata/test_reopened_streams.py"
_RECOVERERS = "tests/metadata/test_recoverers.py"

FENCES = (
    Mutant(
        "fenced-node-opens-again",
        "A process that another recovers lists its streams under its old epoch and goes on.",
        "GetOpeningStreams set the flag that its caller gave, whoever that was",
        """
        streammeta.controller.metadata.nodes:
        - error = self._check_registration(identity, fence_failover=not failover)
        + error = self._check_registration(identity, fence_failover=False)
        """,
        Tested(f"{_RECOVERERS}::test_a_fenced_process_does_not_lift_its_own_fence"),
    ),
    Mutant(
        "fenced-node-registers-again",
        "A process that is fenced, or has unregistered, replaces its registration.",
        "the relative of the above; its log's place is what a recoverer looks for",
        """
        streammeta.controller.metadata.nodes:
        - error = self._check_registration(identity)
        + error = self._check_registration(identity, fence_failover=False)
        """,
        Tested(f"{_RECOVERERS}::test_a_process_that_has_unregistered_does_not_come_back"),
    ),
    Mutant(
        "any-node-reopens",
        "A node that says so takes a stream that another has open.",
        "the wish of an owner passes for ownership",
        """
        streammeta.controller.metadata.stream_decisions:
        - elif head.state == StreamState.OPENED and not (item.reopen and head.node_id == node_id):
        + elif head.state == StreamState.OPENED and not item.reopen:
        """,
        Tested(
            f"{_REOPENED}::"
            "test_an_open_stream_is_refused_without_the_owners_wish_and_to_any_other_node"
        ),
    ),
)
