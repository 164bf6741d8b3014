"""A restored cluster over TLS: certificates of the former cluster hold while its namespace does."""

from __future__ import annotations

from pathlib import Path

import pytest

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster, free_ports, tls_words
from streammeta.cli.recovery.restore_command import name_certificates
from streammeta.client import StreamClient
from streammeta.client.errors import BrokerClientError, PermissionDeniedError
from streammeta.controller.config import ConfigError
from streammeta.controller.tls.manager import TlsManager
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.controller.trust.policy import parse_policy
from streammeta.controller.trust.refusals import NoIdentityError
from streammeta.tls.files import TlsFiles
from streammeta.tls.identity import KnownClusters, Principal, Role
from tests.backup.test_restore_process import NAMESPACE, Restoring, options
from tests.kit.certificates import Authority
from tests.kit.real_cluster import put, streammeta, values
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm
from tests.trust.test_settings import config
from tests.trust.trusted_server import shown

GET_KVS = "streammeta.v1.KVService.GetKVs"
FORMER = Principal("former", Role.BROKER, "1007")


def test_a_caller_of_the_former_cluster_is_one_of_this_cluster() -> None:
    authenticator = Authenticator(KnownClusters("test", "former"))
    assert authenticator.authenticate(GET_KVS, shown(FORMER)).principal == Principal(
        "test", Role.BROKER, "1007"
    )
    with pytest.raises(NoIdentityError, match="cluster"):
        authenticator.authenticate(GET_KVS, shown(Principal("third", Role.BROKER, "1007")))
    with pytest.raises(NoIdentityError, match="cluster"):
        Authenticator("test").authenticate(GET_KVS, shown(FORMER))


def test_the_policy_holds_for_certificates_of_the_former_cluster() -> None:
    policy = parse_policy('[deny]\nprincipals = ["broker/1007"]\n', "test", "policy.toml")
    with pytest.raises(NoIdentityError, match="denied"):
        Authenticator(KnownClusters("test", "former"), policy).authenticate(GET_KVS, shown(FORMER))


def test_a_former_certificate_starts_a_controller_of_the_same_namespace(tmp_path: Path) -> None:
    files = Authority(tmp_path, "ours").issue("controller/1", cluster_id="former")
    TlsManager(config(tls=files, namespace="_streammeta_former"))
    for namespace in ("_streammeta_test", "mine"):
        with pytest.raises(ConfigError, match="former/controller/1"):
            TlsManager(config(tls=files, namespace=namespace))
    TlsManager(config(tls=files, namespace="mine", former_cluster_id="former"))
    with pytest.raises(ConfigError):
        TlsManager(config(tls=files, namespace="_streammeta_former", former_cluster_id="third"))
    with pytest.raises(ConfigError, match="former-cluster-id: 'a b'"):
        config(former_cluster_id="a b")
    other = Authority(tmp_path, "other").issue("controller/2", cluster_id="former")
    with pytest.raises(ConfigError):
        TlsManager(config(tls=other, namespace="_streammeta_former"))


def test_a_restore_names_the_certificates_that_hold() -> None:
    assert name_certificates("_streammeta_demo", "demo") == (
        "Over TLS start it with the certificates of cluster demo."
        " They are valid in the new cluster too."
    )
    assert "demo with --former-cluster-id demo." in name_certificates("mine", "demo")
    twice = name_certificates("_streammeta_demo", "demo-2")
    assert "demo, or those of demo-2 with --former-cluster-id demo-2." in twice


def ready(cluster: LocalCluster, admin: TlsFiles) -> None:
    def answers() -> bool:
        words = ("quorum", "describe", "--connect", cluster.connect, *tls_words(admin))
        return bool(streammeta(*words)["exit_code"] == 0)

    wait_until(answers, "a leader")


@pytest.mark.process
async def test_a_cluster_is_restored_over_tls_with_its_old_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    files = {node_id: authority.issue(f"controller/{node_id}") for node_id in (1, 2, 3)}
    admin, broker = authority.issue("admin/alice"), authority.issue("broker/7")
    (tmp_path / "bucket").mkdir()
    store = f"file://{tmp_path}/bucket"
    former = LocalCluster(
        tmp_path, "test", store, free_ports(3), options(tmp_path), tls=files, starter=start_warm
    )
    backups = ("--from", f"file://{tmp_path}/backups")
    try:
        former.start_all()
        ready(former, admin)
        with ControllerClient(former.endpoints, tls=admin) as client:
            put(client, "key", "value")
        status = ("backup", "status", *backups, "--connect", former.connect, *tls_words(admin))
        wait_until(lambda: streammeta(*status).get("lag_entries") == 0, "all to be copied")
    finally:
        former.stop_all()

    restoring = Restoring(tmp_path, "second")
    assert restoring.make_plan()["exit_code"] == 0
    restoring.applied()
    restored = restoring.cluster
    restored.tls = files  # those of the former cluster
    try:
        restored.start_all()
        ready(restored, admin)
        at = ("--connect", restored.connect, "--store", store, *tls_words(admin))
        finish = ("restore", "finish", *at, *backups, "--old-controllers-stopped")
        wait_until(lambda: streammeta(*finish)["exit_code"] == 0, "the end of recovery mode")
        with ControllerClient(restored.endpoints, tls=admin) as client:
            assert values(client)["key"] == "value"
        where = (restored.endpoints, store)
        async with await StreamClient.open(*where, node_id=7, tls=broker) as client:
            (stream_id,) = await client.create_streams([{}])
            (await client.open_streams([stream_id])).require_all()
            assert await client.append(stream_id, b"after") == 0
        stranger = authority.issue("broker/7", cluster_id="other")
        with pytest.raises(BrokerClientError) as refused:
            await StreamClient.open(*where, node_id=7, tls=stranger)
        assert isinstance(refused.value, PermissionDeniedError)
        assert NAMESPACE == "_streammeta_test"
    finally:
        restored.stop_all()
