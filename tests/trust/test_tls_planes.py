"""Three real controllers with TLS on any of their planes: each is protected as it is told to be."""

from __future__ import annotations

import http.client
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster, free_ports, tls_words
from streammeta.tls.files import TlsFiles
from streammeta.v1 import kv_pb2
from tests.kit.certificates import Authority
from tests.kit.real_cluster import STEADY
from tests.kit.warm_start import start_warm
from tests.monitoring.http_calls import get
from tests.trust.audited_cluster import ask

pytestmark = pytest.mark.process

PLANES = ("clients", "peers", "http")


def options_of(files: TlsFiles, over_tls: set[str], http_endpoint: str) -> Sequence[str]:
    """Return what makes a controller speak TLS on these planes and plain text on the others."""
    words = ["--http-listen", http_endpoint]
    if "clients" in over_tls:  # its files are those of the others too
        words += tls_words(files)
        words += () if "peers" in over_tls else ("--peer-plain-text", "spoken")
        words += () if "http" in over_tls else ("--http-plain-text",)
        return words
    for plane, option in (("peers", "peer-tls"), ("http", "http-tls")):
        words += tls_words(files, option) if plane in over_tls else ()
    return words


def described(cluster: LocalCluster, node_id: int) -> dict[str, str]:
    """Return what a controller logs of its planes when it is ready."""
    lines = map(json.loads, (cluster.root / f"controller-{node_id}.log").read_text().splitlines())
    (ready,) = (line for line in lines if line["event"] == "controller_ready")
    return {plane: ready[plane].partition(" ")[2] for plane in PLANES}


def commits(endpoints: Sequence[str], tls: TlsFiles | None, timeout_s: float) -> bool:
    """Whether a write by these files is answered."""
    item = kv_pb2.KVToPut(key="k", value=b"v", overwrite=True)
    with ControllerClient(endpoints, timeout_s=timeout_s, tls=tls) as client:
        try:
            ask(client, kv_pb2.PutKVsRequest(items=[item]))
        except CallError:
            return False
    return True


def answers(endpoint: str, tls: TlsFiles | None) -> bool:
    """Whether a probe by these files is answered."""
    try:
        return get(endpoint, "/livez", tls) == (200, "ok\n")
    except (OSError, http.client.HTTPException):
        return False


@pytest.mark.parametrize(
    "over_tls",
    [
        {plane for plane, is_on in zip(PLANES, chosen, strict=True) if is_on}
        for chosen in itertools.product((False, True), repeat=3)
    ],
    ids=lambda over_tls: " and ".join(sorted(over_tls)) or "none",
)
def test_each_plane_is_protected_as_it_is_told_to_be(
    authority: Authority, tmp_path: Path, over_tls: set[str]
) -> None:
    (tmp_path / "bucket").mkdir()
    http_endpoints = {each: f"127.0.0.1:{port}" for each, port in enumerate(free_ports(3), 1)}
    cluster = LocalCluster(
        *(tmp_path, "test", f"file://{tmp_path}/bucket", free_ports(3), STEADY),
        own_options={
            each: options_of(authority.issue(f"controller/{each}"), over_tls, endpoint)
            for each, endpoint in http_endpoints.items()
        },
        starter=start_warm,
    )
    admin = authority.issue("admin/alice")
    try:
        cluster.start_all()
        is_encrypted = "clients" in over_tls
        assert commits(cluster.endpoints, admin if is_encrypted else None, 30)
        assert not commits(cluster.endpoints, None if is_encrypted else admin, 0.5)
        is_encrypted = "http" in over_tls
        for endpoint in http_endpoints.values():
            assert answers(endpoint, admin) is is_encrypted
            assert answers(endpoint, None) is not is_encrypted
        spoken = {plane: "tls 1.3" if plane in over_tls else "plain text" for plane in PLANES}
        if "clients" in over_tls and "peers" not in over_tls:
            spoken["peers"] = "tls 1.3, plain text spoken"
        for node_id in cluster.node_ids:
            assert described(cluster, node_id) == spoken
    finally:
        cluster.stop_all()
