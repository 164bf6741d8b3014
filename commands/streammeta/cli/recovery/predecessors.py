"""Fencing of the cluster before a restore or recovery: its lease must expire first.

Its controllers may be alive without access to the bucket, and acknowledge changes until their lease
on the old marker expires. Until then nothing that the new cluster reads or promises is safe.
"""

from __future__ import annotations

import time

import click

from streammeta.cli.framework.client import CallError, Command, ControllerClient
from streammeta.cli.framework.output import CommandError, say_progress
from streammeta.rpc import blocking_client, failures
from streammeta.storage.cluster_files import bucket_marker
from streammeta.storage.object_store.protocol.base import ObjectStore

LEADER_WAIT_S = 30.0
"""Seconds that a leader has to notice that the cluster before it is fenced."""

_LOOK_S = 1.0
"""Seconds between two checks whether another process has already waited."""


def stopped_option(command: Command) -> Command:
    """Add `--old-controllers-stopped`: argument `old_controllers_stopped: bool`."""
    return click.option(
        "--old-controllers-stopped",
        is_flag=True,
        help="Skip the wait: every controller of the old cluster is stopped and can't start"
        " again. If one still runs, the changes that it acknowledges are lost.",
    )(command)


def declare_stopped(store: ObjectStore, generation: bucket_marker.Generation) -> None:
    """Note in the bucket that no controller before a generation runs, as an operator declared."""
    _put_mark(store, generation, is_declared=True)


def wait_for_fence(
    store: ObjectStore, namespace: str, *, cluster_uuid: str, is_declared: bool
) -> None:
    """Return once no controller before the generation of a cluster can acknowledge a change.

    The wait counts from the first look of this process at the generation. It ends early if a
    controller of the cluster has waited. A cluster that was never restored needs no wait.

    Raises:
        CommandError: another cluster has taken over the bucket.
    """
    ends_at, number = 0.0, None
    while (generation := bucket_marker.read_ownership(store, namespace).unfenced) is not None:
        if generation.cluster_uuid != cluster_uuid:
            raise CommandError(
                "SUPERSEDED",
                f"cluster {generation.cluster_id!r} has taken over the bucket meanwhile",
                "nothing was marked. Connect to the controllers of that cluster",
            )

        # Only this process's clock counts. No clocks of different machines are compared.
        now = time.monotonic()
        if number != generation.number:
            ends_at, number = now + bucket_marker.FENCE_WAIT_MS / 1000, generation.number
        if is_declared or now >= ends_at:
            # The mark spares all later processes the wait.
            _put_mark(store, generation, is_declared=is_declared)
            return
        say_progress(
            f"waiting {ends_at - now:.0f} s: controllers of the old cluster may still"
            " acknowledge changes",
            ends="\r",
        )
        # Look often, because a controller of the cluster may put the mark first.
        time.sleep(min(_LOOK_S, ends_at - now))


def call_when_fenced(
    client: ControllerClient,
    method: blocking_client.UnaryMethod[blocking_client.Request, blocking_client.Response],
    request: blocking_client.Request,
) -> blocking_client.Response:
    """Call the leader, and retry until it knows that the old cluster is fenced.

    Raises:
        CallError: the leader rejects the call for another reason, or for too long.
    """
    ends_at = time.monotonic() + LEADER_WAIT_S
    while True:
        try:
            return client.call(method, request)
        except CallError as error:
            if error.code != failures.Reason.FENCE_PENDING or time.monotonic() > ends_at:
                raise
        time.sleep(0.2)


def _put_mark(
    store: ObjectStore, generation: bucket_marker.Generation, *, is_declared: bool
) -> None:
    mark = bucket_marker.Fenced(
        cluster_uuid=generation.cluster_uuid,
        number=generation.number,
        is_declared=is_declared,
        created_ms=time.time_ns() // 1_000_000,
    )
    bucket_marker.put_fenced(store, generation.namespace, mark)
