"""Identity of a cluster and its store: controllers, map and bucket must be of one cluster.

A cluster is known by its id, its UUID, and the namespace of its keys. Ids are not unique ("dev"),
UUIDs are. Two store addresses name the same place only if scheme, endpoint and bucket, or the
folder, are the same. Any difference, or anything missing or unreadable, is an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.vocabulary.errors import ConfigurationError, ControllerError
from streammeta.storage.cluster_files.bucket_marker import (
    check_marker,
    read_claimed,
    read_generations,
    read_marker,
    read_undecided,
)
from streammeta.storage.errors import StorageError
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.address import S3Config, without_secrets
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import admin_pb2, objects_pb2

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_AMAZON = "Amazon S3"


def open_store(uri: str) -> ObjectStore:
    """Open the store and make sure that it answers.

    Raises:
        ConfigurationError: `uri` does not name a store.
        StorageError: there is no such bucket, the credentials are wrong, or it does not answer.
    """
    try:
        store = open_object_store(uri)
    except ValueError as error:
        raise _no_store(uri, error) from error
    try:
        store.check()
    except StorageError:
        store.close()
        raise
    return store


def place_of(uri: str) -> str:
    """Return the place that a store URI names, normalised: bucket and endpoint, or the folder.

    An endpoint that is not in the URI is that of the environment, or else Amazon's.

    Raises:
        ConfigurationError: `uri` does not name a store.
    """
    try:
        if urlsplit(uri).scheme == "file":
            return Path(unquote(urlsplit(uri).path)).resolve().as_uri()
        config = S3Config.from_uri(uri)
        from_environment = (os.environ.get(name) for name in _ENDPOINT_VARIABLES)
        endpoint = config.endpoint_url or next(filter(None, from_environment), None)
        return f"s3://{config.bucket} at {_AMAZON if endpoint is None else _normal(endpoint)}"
    except ValueError as error:
        raise _no_store(uri, error) from error


def _normal(endpoint: str) -> str:
    """Return the endpoint without case, default port and user."""
    parts = urlsplit(endpoint)
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    return f"{parts.scheme}://{parts.hostname}:{port}{parts.path.rstrip('/')}"


def _no_store(uri: str, error: ValueError) -> ConfigurationError:
    return ConfigurationError(
        f"--store {without_secrets(uri)!r} does not name a store ({error}); wanted"
        " s3://BUCKET?endpoint=URL or file:///FOLDER"
    )


_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """Id, UUID and namespace of a cluster; none of them empty."""

    cluster_id: str
    cluster_uuid: str
    namespace: str

    def described(self) -> str:
        """The three of them, for messages."""
        return _named(self.cluster_id, self.cluster_uuid, self.namespace)


def identify(
    leader: LeaderClient,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ClusterIdentity:
    """The cluster that the given controllers agree to be.

    A leader that has just taken over has yet to look at its bucket: it is asked again for as long
    as a leader is looked for.

    Raises:
        ControllerError: no leader answers, controllers are of different clusters, or the cluster
            has not taken possession of its bucket.
    """
    deadline = clock() + leader.patience_s
    while True:
        try:
            return _agreed(leader.describe())
        except _NotYetError:
            if clock() >= deadline:
                raise
        sleep(_PAUSE_S)


class _NotYetError(ControllerError):
    """The leader has not taken possession of its bucket yet."""


def _agreed(described: dict[str, admin_pb2.DescribeClusterResponse]) -> ClusterIdentity:
    leader, leading = next(iter(described.items()))
    if not leading.object_namespace:
        raise ControllerError(
            f"{leader} tells no namespace of keys; run the same version of streammeta"
            " here as on the controllers"
        )

    identity = _identity_of(leading, leading.cluster_uuid)
    for endpoint, one in described.items():
        # A follower learns the UUID late; any other difference is another cluster.
        known = _identity_of(one, one.cluster_uuid or leading.cluster_uuid)
        if known != identity:
            raise ControllerError(
                f"{endpoint} is of {known.described()}, but the leader is of"
                f" {identity.described()}; let --connect name controllers of one cluster"
            )

    if not identity.cluster_uuid:
        raise _NotYetError(
            f"cluster {identity.cluster_id!r} has no UUID and so no marker in a bucket; the leader"
            " draws it once its bucket answers: see the leader's log, then repeat"
        )

    for endpoint, one in described.items():
        if one.bucket_problem:
            raise _NotYetError(
                f"the controller at {endpoint} does not trust its bucket:"
                f" {one.bucket_problem}; mend that first"
            )

    return identity


def _identity_of(
    described: admin_pb2.DescribeClusterResponse, cluster_uuid: str
) -> ClusterIdentity:
    return ClusterIdentity(described.cluster_id, cluster_uuid, described.object_namespace)


def check_bucket(store: ObjectStore, identity: ClusterIdentity) -> int:
    """The bound below which the bucket says that object ids were issued.

    Raises:
        WrongBucketError: the bucket has no marker of this cluster.
        StorageError: marker or claims can't be read.
    """
    check_marker(
        read_marker(store, identity.namespace),
        cluster_id=identity.cluster_id,
        cluster_uuid=identity.cluster_uuid,
        namespace=identity.namespace,
    )
    return read_claimed(store, identity.namespace)


def undecided_ids(store: ObjectStore, identity: ClusterIdentity) -> tuple[tuple[int, int], ...]:
    """The ranges of object ids that restores have left undecided, and nobody has given up.

    They are read before the map is copied.

    Raises:
        StorageError: the markers can't be read.
    """
    found = read_undecided(store, identity.namespace)
    return tuple((one.undecided_from, one.undecided_below) for one in found)


def settled_below(store: ObjectStore, identity: ClusterIdentity) -> int:
    """The bound of the object ids that were issued before the newest restore; 0: there was none.

    Raises:
        StorageError: the markers can't be read.
    """
    generations = read_generations(store, identity.namespace)
    return generations[-1].undecided_below if generations else 0


def check_standing(
    standing: objects_pb2.CheckObjectsResponse,
    identity: ClusterIdentity,
    *,
    claimed_below: int,
    next_object_id: int,
) -> None:
    """Refuse the leader's answer unless it is of `identity` and its map lost no ids.

    `claimed_below` is the bound read in the bucket before the leader was asked, `next_object_id`
    that of the plan.

    Raises:
        ControllerError: the leader is of another cluster, or its map is older than bucket or plan.
    """
    said = (standing.cluster_id, standing.cluster_uuid)
    if said != (identity.cluster_id, identity.cluster_uuid):
        raise ControllerError(
            f"the controllers are of {_named(*said, '')}, but the plan is of"
            f" {identity.described()}; apply it with --connect of its own cluster"
        )
    if standing.issued_below < claimed_below or standing.next_object_id < next_object_id:
        raise ControllerError(
            f"the map issues object ids below {standing.issued_below} and the next is"
            f" {standing.next_object_id}, but the bucket's claims reach {claimed_below} and the"
            f" plan saw {next_object_id}: the map was restored to an earlier state; nothing may be"
            " deleted by it"
        )


def _named(cluster_id: str, cluster_uuid: str, namespace: str) -> str:
    shown = f"cluster {cluster_id!r}, UUID {cluster_uuid or 'unknown'}"
    return f"{shown}, namespace {namespace!r}" if namespace else shown
