"""Identity of a cluster and its store: controllers, metadata and bucket must match.

A cluster is identified by its id, its UUID and the namespace of its keys. Ids are not unique
("dev"), UUIDs are. Two store addresses name the same place only if scheme, endpoint and bucket, or
the folder, are equal. Any difference, or a missing or unreadable part, is an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.vocabulary.errors import ConfigurationError, ControllerError
from streammeta.storage.cluster_files import bucket_marker
from streammeta.storage.errors import StorageError
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.address import S3Config, StoreAddress, without_secrets
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import admin_pb2, objects_pb2

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_AMAZON = "Amazon S3"


def parse_store(uri: str) -> StoreAddress:
    """Parse the address of a store. Raises `ConfigurationError`."""
    with _explaining(uri):
        return StoreAddress.parse(uri)


def open_store(address: StoreAddress) -> ObjectStore:
    """Open the store and check that it answers.

    Raises:
        ConfigurationError: the server's name or the region is impossible.
        StorageError: the bucket does not exist, the credentials are wrong, or it does not answer.
    """
    with _explaining(address.uri):
        store = open_object_store(address)
    try:
        store.check()
    except StorageError:
        # The caller gets no store to close after an error.
        store.close()
        raise
    return store


@contextmanager
def _explaining(uri: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigurationError(
            f"--store {without_secrets(uri)!r} does not name a store ({error}), expected"
            " s3://BUCKET?endpoint=URL or file:///FOLDER"
        ) from error


def place_of(address: StoreAddress) -> str:
    """Return the normalized place of a store: bucket and endpoint, or the folder.

    The default endpoint comes from the environment, or is Amazon's.
    """
    config = address.target
    if not isinstance(config, S3Config):
        # Links to one folder are one place.
        return config.resolve().as_uri()
    # The order of botocore: the variable of the service overrides the general one.
    from_environment = (os.environ.get(name) for name in _ENDPOINT_VARIABLES)
    endpoint = config.endpoint_url or next(filter(None, from_environment), None)
    return f"s3://{config.bucket} at {_AMAZON if endpoint is None else _normal(endpoint)}"


def _normal(endpoint: str) -> str:
    """Return the endpoint without case, default port and user."""
    parts = urlsplit(endpoint)
    # `http://h` and `http://h:80` are one endpoint.
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    return f"{parts.scheme}://{parts.hostname}:{port}{parts.path.rstrip('/')}"


# A new leader checks its bucket within a second or so of its election.
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """Id, UUID and namespace of a cluster, none of them empty."""

    cluster_id: str
    cluster_uuid: str
    namespace: str

    def describe(self) -> str:
        """Return id, UUID and namespace for messages."""
        return _describe(self.cluster_id, self.cluster_uuid, self.namespace)


def identify(
    leader: LeaderClient,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ClusterIdentity:
    """Return the cluster that all given controllers belong to.

    A new leader has not checked its bucket yet, so it is asked again until the client's patience
    ends.

    Raises:
        ControllerError: no leader answers, controllers belong to different clusters, or the
            cluster has not claimed its bucket.
    """
    deadline = clock() + leader.patience_s
    while True:
        try:
            return _compare_answers(leader.describe())
        except _NotYetError:
            if clock() >= deadline:
                raise
        sleep(_PAUSE_S)


class _NotYetError(ControllerError):
    """The leader has not claimed its bucket yet."""


def _compare_answers(described: dict[str, admin_pb2.DescribeClusterResponse]) -> ClusterIdentity:
    # `describe` returns the leader's answer first.
    leader, leading = next(iter(described.items()))
    if not leading.object_namespace:
        raise ControllerError(
            f"{leader} does not report its namespace. Run the same version of streammeta here as"
            " on the controllers"
        )

    identity = _identity_of(leading, leading.cluster_uuid)
    for endpoint, answer in described.items():
        # A follower may not have replayed the UUID yet. Any other difference is another cluster.
        known = _identity_of(answer, answer.cluster_uuid or leading.cluster_uuid)
        if known != identity:
            raise ControllerError(
                f"{endpoint} belongs to {known.describe()}, but the leader to"
                f" {identity.describe()}. Let --connect name controllers of one cluster"
            )

    if not identity.cluster_uuid:
        raise _NotYetError(
            f"cluster {identity.cluster_id!r} has no UUID and no marker in a bucket yet. The leader"
            " creates both when its bucket answers, see its log, then repeat"
        )

    for endpoint, answer in described.items():
        if answer.bucket_problem:
            raise _NotYetError(
                f"controller at {endpoint} does not trust its bucket:"
                f" {answer.bucket_problem}; fix that first"
            )

    return identity


def _identity_of(
    described: admin_pb2.DescribeClusterResponse, cluster_uuid: str
) -> ClusterIdentity:
    return ClusterIdentity(described.cluster_id, cluster_uuid, described.object_namespace)


def check_bucket(store: ObjectStore, identity: ClusterIdentity) -> int:
    """Check the bucket's marker, and return the bound of the ids that its claims say were issued.

    Raises:
        WrongBucketError: the bucket has no marker of this cluster.
        StorageError: marker or claims can't be read.
    """
    bucket_marker.check_marker(
        bucket_marker.read_marker(store, identity.namespace),
        cluster_id=identity.cluster_id,
        cluster_uuid=identity.cluster_uuid,
        namespace=identity.namespace,
    )
    return bucket_marker.read_claimed(store, identity.namespace)


def undecided_ids(store: ObjectStore, identity: ClusterIdentity) -> tuple[tuple[int, int], ...]:
    """Return the ranges of object ids that restores left undecided and no operator gave up.

    Call it before the metadata is copied.

    Raises:
        StorageError: the markers can't be read.
    """
    generations = bucket_marker.read_undecided(store, identity.namespace)
    return tuple(
        (generation.undecided_from, generation.undecided_below) for generation in generations
    )


def settled_below(store: ObjectStore, identity: ClusterIdentity) -> int:
    """Return the bound of the object ids issued before the newest restore, or 0 without one.

    Raises:
        StorageError: the markers can't be read.
    """
    generations = bucket_marker.read_generations(store, identity.namespace)
    return generations[-1].undecided_below if generations else 0


def check_standing(
    standing: objects_pb2.CheckObjectsResponse,
    identity: ClusterIdentity,
    *,
    claimed_below: int,
    next_object_id: int,
) -> None:
    """Reject the leader's answer unless it belongs to `identity` and its metadata lost no ids.

    `claimed_below` is the bucket's bound before the call to the leader, `next_object_id` comes from
    the plan.

    Raises:
        ControllerError: the leader belongs to another cluster, or its metadata is older than bucket
            or plan.
    """
    found = (standing.cluster_id, standing.cluster_uuid)
    if found != (identity.cluster_id, identity.cluster_uuid):
        raise ControllerError(
            f"controllers belong to {_describe(*found, '')}, but the plan to"
            f" {identity.describe()}. Apply it with --connect of its cluster"
        )
    # Ids only grow. A leader that knows fewer ids than bucket or plan was restored to an earlier
    # state, and its unknown objects may be live.
    if standing.issued_below < claimed_below or standing.next_object_id < next_object_id:
        raise ControllerError(
            f"metadata was restored to an earlier state: it issues object ids below"
            f" {standing.issued_below} and the next is {standing.next_object_id}, but the bucket's"
            f" claims reach {claimed_below} and the plan saw {next_object_id}. Delete nothing with"
            " this metadata"
        )


def _describe(cluster_id: str, cluster_uuid: str, namespace: str) -> str:
    shown = f"cluster {cluster_id!r}, UUID {cluster_uuid or 'unknown'}"
    return f"{shown}, namespace {namespace!r}" if namespace else shown
