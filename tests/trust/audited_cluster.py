"""Real controllers that record calls, and calls to them by any request of the contract."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.tls.files import TlsFiles
from tests.kit.real_cluster import STEADY


class AuditedCluster(LocalCluster):
    """Controllers with an audit log each."""

    def audit_log(self, node_id: int) -> Path:
        """Return where a controller records calls."""
        return self.root / f"audit-{node_id}.log"

    def _command(self, node_id: int) -> list[str]:
        command = LocalCluster._command(self, node_id)
        path = str(self.audit_log(node_id))
        return [*command, "--audit-log", path, "--log-level", "debug"]

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of all controllers, each controller's in order."""
        paths = [self.audit_log(node_id) for node_id in self.node_ids]
        return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]


@contextmanager
def audited_cluster(
    root: Path, count: int, tls: Mapping[int, TlsFiles] | None = None
) -> Iterator[AuditedCluster]:
    """Start `count` controllers; stop those that still run at the end."""
    bucket = root / "bucket"
    bucket.mkdir()
    cluster = AuditedCluster(root, "test", f"file://{bucket}", free_ports(count), STEADY)
    cluster.tls = tls or {}
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop_all()


def ask(client: ControllerClient, request: Message) -> Any:
    """Call the RPC that takes such a request, at the leader."""
    asked = request.DESCRIPTOR
    services = asked.file.services_by_name.values()
    rpc = next(each for one in services for each in one.methods if each.input_type is asked)
    response = GetMessageClass(rpc.output_type)  # type: ignore[arg-type]
    path = f"/{rpc.containing_service.full_name}/{rpc.name}"

    def method(channel: Any) -> Any:
        return channel.unary_unary(
            path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )

    return client.call(method, request)
