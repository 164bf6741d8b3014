"""The services of the map over TLS in the test's own process, and contexts of its callers."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc

from streammeta.controller.grpc_server.server import new_server
from streammeta.controller.lifecycle.broker_sessions import Sessions
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.rpc.connections import client_channel
from streammeta.tls.identity import Principal
from tests.kit.certificates import Authority
from tests.kit.map_services import map_services
from tests.kit.memory_log import CommittingLog
from tests.kit.waiting import ManualClock
from tests.server.rpc_server import Rpcs, empty_leader

CLUSTER = "test"


@dataclass
class TrustedServer:
    """A leader of an empty map."""

    authority: Authority
    controller: MetadataController
    log: CommittingLog
    clock: ManualClock
    sessions: Sessions
    endpoint: str
    authenticator: Authenticator
    open: AsyncExitStack
    token_endpoint: str
    """Where callers show tokens."""
    known: dict[str, Rpcs] = field(default_factory=dict)

    async def by(self, principal: str, cluster_id: str = CLUSTER) -> Rpcs:
        """Return a connection of the caller with this certificate, such as `broker/1007`."""
        name = f"{cluster_id}/{principal}"
        if name not in self.known:
            tls = self.authority.issue(principal, cluster_id=cluster_id)
            channel: grpc.aio.Channel = client_channel(self.endpoint, tls)
            await self.open.enter_async_context(channel)
            self.known[name] = Rpcs(self.controller, self.log, self.clock, self.sessions, channel)
        return self.known[name]

    def state(self) -> tuple[int, bytes]:
        """Return what every change of the map changes."""
        return self.log.next_offset, self.controller.cluster_metadata.state_hash()


@asynccontextmanager
async def trusting(authority: Authority) -> AsyncIterator[TrustedServer]:
    """Yield a leader of an empty map that asks every caller for a certificate."""
    clock, controller, log, sessions = empty_leader()
    server = new_server()
    trusted = Authenticator(CLUSTER)
    server.add_generic_rpc_handlers(
        map_services(CLUSTER, controller, sessions, clock, authenticator=trusted)
    )
    shown = authority.issue("controller/1")
    port = server.listen("127.0.0.1:0", shown)
    token_port = server.listen("127.0.0.1:0", shown, asks_clients=False)
    await server.start()
    try:
        async with AsyncExitStack() as stack:
            endpoint = f"127.0.0.1:{port}"
            by_token = f"127.0.0.1:{token_port}"
            yield TrustedServer(
                authority, controller, log, clock, sessions, endpoint, trusted, stack, by_token
            )
    finally:
        await server.stop(None)


@dataclass(frozen=True)
class ShownContext:
    """A call's context of which only the handshake matters."""

    proven: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    metadata: Sequence[tuple[str, str]] = ()

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self.metadata

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return self.proven


PLAIN_TEXT = ShownContext(
    {"transport_security_type": [b"insecure"], "security_level": [b"TSI_SECURITY_NONE"]}
)


def shown(*uris: Principal | str, certificate: bytes = b"") -> ShownContext:
    """Return the context of a call under TLS whose certificate has these URIs."""
    texts = [uri if isinstance(uri, str) else uri.uri for uri in uris]
    body = base64.b64encode(certificate or repr(texts).encode())
    pem = b"-----BEGIN CERTIFICATE-----\n" + body + b"\n-----END CERTIFICATE-----\n"
    return ShownContext(
        {
            "transport_security_type": [b"ssl"],
            "x509_pem_cert": [pem],
            "peer_uri": [text.encode() for text in texts],
        }
    )
