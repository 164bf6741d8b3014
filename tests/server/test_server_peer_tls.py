"""Three real controllers that speak TLS to each other, and one that can not."""

from __future__ import annotations

from pathlib import Path

from streammeta.cli.client import ControllerClient
from tests.kit.certificates import Authority
from tests.kit.real_cluster import FAST, leader_of, put, running_cluster, wait_until


def test_controllers_with_certificates_form_a_quorum_that_a_stranger_does_not_join(
    tmp_path: Path,
) -> None:
    files = Authority(tmp_path, "cluster").issue("controller/1")
    tls = (
        *("--peer-tls-cert", str(files.certificate), "--peer-tls-key", str(files.key)),
        *("--peer-tls-ca", str(files.ca)),
    )
    with running_cluster(tmp_path, 3, (*FAST, *tls)) as cluster:
        with ControllerClient(cluster.endpoints) as client:
            put(client, "k", "v")
            cluster.children[leader_of(cluster)].kill()
            put(client, "l", "w")

        cluster.options = FAST
        stranger = cluster.join()
        log = cluster.root / f"controller-{stranger}.log"
        wait_until(lambda: "do both sides speak TLS" in log.read_text(), "it is refused")
