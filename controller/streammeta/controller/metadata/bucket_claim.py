"""Claims of the cluster on its bucket: its UUID, and the bound below which it may issue object ids.

Holds the two values and their rule: a UUID that is set never changes, and the bound only grows.
Knows no bucket; see `storage.bucket_marker` for what is written there and in which order.
"""

from dataclasses import dataclass

from streammeta.controller.errors import InvariantError
from streammeta.controller.metadata.answers import ClaimBucketAnswer
from streammeta.controller.metadata.columns import Undo
from streammeta.controller.metadata.requests import ClaimBucket
from streammeta.controller.records.record import BucketClaimed


@dataclass(frozen=True, slots=True)
class Claim:
    """UUID of the cluster ("": none yet); object ids below `issued_below` may be issued."""

    cluster_uuid: str = ""
    issued_below: int = 0


class BucketClaim:
    """The replicated claim."""

    def __init__(self) -> None:
        self.current = Claim()

    def decide(self, request: ClaimBucket) -> tuple[BucketClaimed | None, ClaimBucketAnswer]:
        """Set the UUID if there is none, raise the bound; None if neither changes."""
        before = self.current
        claim = Claim(
            before.cluster_uuid or request.cluster_uuid,
            max(before.issued_below, request.issued_below),
        )
        answer = ClaimBucketAnswer(cluster_uuid=claim.cluster_uuid, issued_below=claim.issued_below)
        if claim == before:
            return None, answer
        record = BucketClaimed(cluster_uuid=claim.cluster_uuid, issued_below=claim.issued_below)
        return record, answer

    def replay(self, record: BucketClaimed, undo: Undo) -> None:
        """See `BucketClaimed`.

        Raises:
            InvariantError: the record would change the UUID or lower the bound.
        """
        before = self.current
        claim = Claim(record.cluster_uuid, record.issued_below)
        if not claim.cluster_uuid or before.cluster_uuid not in ("", claim.cluster_uuid):
            raise InvariantError(
                f"record sets the cluster's UUID to {claim.cluster_uuid!r}, "
                f"but it is {before.cluster_uuid!r}"
            )
        if claim.issued_below < before.issued_below:
            raise InvariantError(
                f"record lowers the bound of object ids to {claim.issued_below}, "
                f"but it is {before.issued_below}"
            )
        self.current = claim
        undo.append(lambda: setattr(self, "current", before))
