"""Real controllers that record calls, calls by any request, and audit logs of tests."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.controller.trust.audit.file import Entry
from streammeta.controller.trust.audit.lines import AuditLine, Chain, Origin, Verdict
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
    rpc = next(
        method for service in services for method in service.methods if method.input_type is asked
    )
    response = GetMessageClass(rpc.output_type)  # type: ignore[arg-type]
    path = f"/{rpc.containing_service.full_name}/{rpc.name}"

    def method(channel: Any) -> Any:
        return channel.unary_unary(
            path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )

    return client.call(method, request)


ALICE = Origin("admin/alice", "12ab", "10.0.0.9:4711")


def line(number: int, *, node: int = 3, call: str = "NodeService.LockNode") -> AuditLine:
    """Return a line that differs from those of other numbers."""
    return AuditLine(
        ts_ms=1_800_000_000_000 + number,
        node=node,
        epoch=7,
        leader=True,
        call=call,
        verdict=Verdict.OK,
        origin=ALICE,
        target={"node": 1000 + number},
        offset=100 + number,
    )


def chained(count: int, *, node: int = 3, chain: Chain | None = None) -> list[bytes]:
    """Return lines of one chain, each with its newline."""
    chain = Chain() if chain is None else chain
    return [chain.link(line(number, node=node)) for number in range(count)]


@dataclass
class MemoryLog:
    """An `AuditLog` that fails when it is told to."""

    chain: Chain = field(default_factory=Chain)
    written: list[bytes] = field(default_factory=list)
    synced: int = 0
    reopened: int = 0
    error: OSError | None = None
    sync_error: OSError | None = None

    def append(self, entries: Sequence[Entry]) -> None:
        if self.error is not None:
            raise self.error
        self.written += [self.chain.link(entry.line, entry.dropped) for entry in entries]

    def sync(self) -> None:
        if self.sync_error is not None:
            raise self.sync_error
        self.synced = len(self.written)

    def reopen(self) -> None:
        self.reopened += 1

    def close(self) -> None:
        pass
