"""The cluster's UUID is set once, the bound of object ids only grows, whatever is asked."""

import pytest

from streammeta.controller.errors import InvalidRequestError, InvariantError
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.metadata.maintenance import Claim
from streammeta.controller.metadata.requests import ClaimBucket
from streammeta.controller.records.record import BucketClaimed
from tests.metadata.test_metadata_uploads import World


def test_the_first_uuid_stays_and_the_bound_only_grows() -> None:
    world = World()
    assert world.map.bucket_claim == Claim("", 0)
    for uuid, bound, expected in (
        ("a", 0, Claim("a", 0)),
        ("b", 0, Claim("a", 0)),
        ("b", 70, Claim("a", 70)),
        ("a", 60, Claim("a", 70)),
        ("a", 2**63 - 1, Claim("a", 2**63 - 1)),
    ):
        answer = world.write(ClaimBucket(cluster_uuid=uuid, issued_below=bound))
        assert Claim(answer.cluster_uuid, answer.issued_below) == expected
        assert world.map.bucket_claim == expected


def test_what_changes_nothing_is_no_record() -> None:
    world = World()
    request = ClaimBucket(cluster_uuid="a", issued_below=7)
    world.write(request)
    assert world.map.decide(request, 0, world.map.applied_end_offset).records == ()


@pytest.mark.parametrize(("uuid", "bound"), [("", 9), ("b", 9), ("a", 6)])
def test_a_record_that_would_change_the_uuid_or_lower_the_bound_does_not_fit(
    uuid: str, bound: int
) -> None:
    world = World()
    world.write(ClaimBucket(cluster_uuid="a", issued_below=7))
    with pytest.raises(InvariantError, match=r"record (sets the cluster's UUID|lowers the bound)"):
        world.map.apply(
            world.map.applied_end_offset, [BucketClaimed(cluster_uuid=uuid, issued_below=bound)]
        )
    assert world.map.bucket_claim == Claim("a", 7)


@pytest.mark.parametrize(
    ("field", "uuid", "bound"),
    [
        ("cluster_uuid", "", 0),
        ("cluster_uuid", "u" * 65, 0),
        ("issued_below", "u", -1),
        ("issued_below", "u", 2**63),
    ],
)
def test_malformed_requests_are_refused(field: str, uuid: str, bound: int) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        ClusterMap().decide(ClaimBucket(cluster_uuid=uuid, issued_below=bound), 0, 0)


def test_checkpoints_of_versions_without_claims_are_read() -> None:
    sections = dict(World().map.freeze().sections())
    del sections["bucket_claim"]
    assert ClusterMap.from_sections(sections, 1).bucket_claim == Claim("", 0)
