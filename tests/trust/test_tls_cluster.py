"""Three real controllers over TLS: who takes part, and replaced certificates under load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from streammeta.cli.local_cluster import LocalCluster, free_ports
from streammeta.client import ControllerClient, ControllerUnavailableError
from streammeta.client.methods import PUT_KVS
from streammeta.v1 import common_pb2, kv_pb2
from tests.kit.certificates import Authority
from tests.kit.real_cluster import FAST, wait_until

pytestmark = pytest.mark.process


@contextmanager
def cluster_of(authority: Authority, root: Path, *options: str) -> Iterator[LocalCluster]:
    """Run three controllers with certificates of their own."""
    (root / "bucket").mkdir()
    cluster = LocalCluster(
        root,
        "test",
        f"file://{root / 'bucket'}",
        free_ports(3),
        (*FAST, *options),
        tls={node_id: authority.issue(f"controller/{node_id}") for node_id in (1, 2, 3)},
    )
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop_all()


async def put(client: ControllerClient, key: str) -> None:
    item = kv_pb2.KVToPut(key=key, value=b"v", overwrite=True)
    answer = await client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
    assert answer.results[0].error == common_pb2.ERROR_CODE_NONE


async def test_only_those_with_certificates_take_part(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    alice = authority.issue("admin/alice")
    with cluster_of(authority, tmp_path) as cluster:
        async with ControllerClient(cluster.endpoints, tls=alice) as client:
            await put(client, "k")
        bundle = tmp_path / "both.pem"
        bundle.write_bytes(authority.ca.read_bytes() + stranger.ca.read_bytes())
        for tls in (None, replace(stranger.issue("admin/alice"), ca=bundle)):
            async with ControllerClient(cluster.endpoints, deadline_s=1, tls=tls) as refused:
                with pytest.raises(ControllerUnavailableError) as raised:
                    await refused.describe_cluster()
            assert ("look at the controller's log" in str(raised.value)) == (tls is not None)

        cluster.tls = {}
        joined = cluster.join()
        log = cluster.root / f"controller-{joined}.log"
        wait_until(lambda: "do both sides speak TLS" in log.read_text(), "it is refused")
