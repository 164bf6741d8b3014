"""Callers of the demo: each part calls the controllers with a certificate for its role."""

from collections.abc import Sequence
from dataclasses import dataclass

from streammeta.cli.framework.client import ControllerClient as OperatorClient
from streammeta.cli.local.dev_command import LocalCertificates
from streammeta.cli.local.local_cluster import LocalCluster, tls_words
from streammeta.client.parts import ControllerClient
from streammeta.tls.files import TlsFiles
from streammeta.tls.identity import Role


@dataclass(frozen=True, slots=True)
class Caller:
    """Holder of one certificate, and the controllers that it calls."""

    endpoints: Sequence[str]
    tls: TlsFiles

    @property
    def words(self) -> Sequence[str]:
        """Return the options by which a command connects as this caller."""
        return ("--connect", ",".join(self.endpoints), *tls_words(self.tls))

    def operator(self) -> OperatorClient:
        """Return a blocking client, to be closed."""
        # The brokers of a story may keep a small machine busy for many seconds.
        return OperatorClient(self.endpoints, 60.0, self.tls)

    def client(self) -> ControllerClient:
        """Return a broker's client, to be closed."""
        return ControllerClient(self.endpoints, tls=self.tls)


class Callers:
    """Certificates of all parts of the demo, made by an authority below the cluster's folder."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._certificates = LocalCertificates(cluster.root, cluster.cluster_id)
        cluster.tls = self._certificates.controllers(cluster.node_ids)
        self.admin = self._of(Role.ADMIN, "demo")
        self.reader = self._of(Role.READER, "demo")
        self.compactor = self._of(Role.COMPACTOR, "demo")
        self.reconciler = self._of(Role.RECONCILER, "demo")

    def broker(self, node_id: int) -> Caller:
        """Return the caller that is this broker."""
        return self._of(Role.BROKER, node_id)

    def _of(self, role: Role, name: str | int) -> Caller:
        return Caller(self._cluster.endpoints, self._certificates.of(role, name))
