"""Mutants of how the Kafka-shaped broker serves its clients: answers, sessions, administration."""

from tests.mutants.mutant import Mutant, Tested

_OFFSETS = "tests/brokers/test_group_offsets.py"

_FENCES = (
    Mutant(
        "first-offset-without-the-fence",
        "A former coordinator answers that the first offset of a partition is committed.",
        "a key that has no version yet, so that no version refuses it",
        """
        streammeta.brokers.kafka.group_offsets:
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
        streammeta.brokers.kafka.group_offsets:
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
        streammeta.brokers.kafka.group_offsets:
        - completed = fence.get(_COMPLETED, 0)
        + completed = version
        """,
        Tested(f"{_OFFSETS}::test_a_first_offset_counts_if_it_came_before_the_successor_listed"),
    ),
)

KAFKA_SERVICE = _FENCES
