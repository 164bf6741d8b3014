"""Cost of admitting a caller: the leader's CPU time before a handler begins.

A server in this process receives one call of each kind of caller, over real connections, and admits
it again and again: by the authenticator alone, by the whole call pipeline before a handler, and by
the same with an audit log, which sums calls of this kind. All are CPU times of the event loop's
thread, so that other work on the machine does not count.
"""

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from scripts.benchmarks.figures import Outcome, Progress, Table, median
from scripts.benchmarks.options import option
from streammeta.cli.local.dev_command import LocalCertificates
from streammeta.controller.grpc_server.server import new_server
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.runtime.clock import SystemClock
from streammeta.controller.trust.audit.auditor import Auditor, LeadershipState
from streammeta.controller.trust.audit.file import AuditFile
from streammeta.controller.trust.audit.writer import AuditWriter
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.controller.trust.policy import parse_policy
from streammeta.controller.trust.tokens import TokenVerifier, parse_keys
from streammeta.rpc.connections import client_channel
from streammeta.storage.durable_files import PosixFileSystem
from streammeta.tls.files import TlsFiles
from streammeta.tls.identity import Role

CLUSTER = "bench"
METHOD = "streammeta.v1.NodeService.GetNodes"
ISSUER, AUDIENCE = "bench", "streammeta"
_CALL = "/bench.Authorization/Measure"
_BROKER, _OTHERS = 7, 1_000
_TOKEN_S = 3600
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Admissions in a turn, and the number of turns, of which the median counts."""

    calls: int = option(2_000, "admissions in a turn")
    turns: int = 15


@dataclass(frozen=True, slots=True)
class _Caller:
    """A kind of caller: its port, its certificate and its metadata."""

    name: str
    port: str
    files: TlsFiles | None = None
    metadata: Sequence[tuple[str, str]] = ()


async def _bare(_: object, __: object) -> bytes:
    return b""


class _Measured:
    """Handler that admits its caller again and again."""

    def __init__(self, settings: Settings, door: Authenticator, auditor: Auditor) -> None:
        self._settings = settings
        self._door = door
        self._entered = CallPipeline(door).wrap(METHOD, _bare)
        self._recorded = CallPipeline(door, auditor).wrap(METHOD, _bare)
        self.found: dict[str, float] = {}

    async def handle(self, _: bytes, context: Any) -> bytes:
        """Measure. `found` has CPU time in microseconds a call."""

        async def authenticate() -> None:
            self._door.authenticate(METHOD, context)

        bare_us = await self._cost_us(lambda: _bare(b"", context))
        ways: dict[str, Callable[[], Awaitable[object]]] = {
            "judged_us": authenticate,
            "let_in_us": lambda: self._entered(b"", context),
            "let_in_and_recorded_us": lambda: self._recorded(b"", context),
        }
        self.found = {name: await self._cost_us(call) - bare_us for name, call in ways.items()}
        return b""

    async def _cost_us(self, call: Callable[[], Awaitable[object]]) -> float:
        """Return the median over the turns, in microseconds."""
        costs: list[float] = []
        for _ in range(self._settings.turns):
            began = time.thread_time_ns()
            for _ in range(self._settings.calls):
                await call()
            costs.append((time.thread_time_ns() - began) / 1000 / self._settings.calls)
        return median(costs)


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Admit each kind of caller under a policy of many lines."""
    certificates = LocalCertificates(root, CLUSTER)
    door = Authenticator(CLUSTER, parse_policy(_policy(), CLUSTER, "policy.toml"))
    token = _accept_tokens(door)
    writer = AuditWriter(AuditFile(PosixFileSystem(), root / "audit.log"))
    auditor = Auditor(writer, SystemClock(), lambda: LeadershipState(1, 1, leads=True))
    measured = _Measured(settings, door, auditor)
    rows: dict[str, Mapping[str, float]] = {}
    async with AsyncExitStack() as stack:
        stack.push_async_callback(writer.stop)
        ports = await _serve(stack, measured, certificates.of(Role.CONTROLLER, 1))
        for caller in _callers(certificates, token):
            progress(f"authorization: {caller.name}")
            endpoint = f"127.0.0.1:{ports[caller.port]}"
            async with client_channel(endpoint, caller.files) as channel:
                call: Any = channel.unary_unary(_CALL)
                await call(b"", metadata=caller.metadata, timeout=_TIMEOUT_S)
            rows[caller.name] = measured.found

    table = Table(
        title="CPU time of admitting a caller, us a call",
        columns=("caller", "authenticated", "all before the handler", "with an audit log"),
        rows=tuple(
            (name, *(round(cost, 2) for cost in row.values())) for name, row in rows.items()
        ),
    )
    figures = {f"{name}: {part}": cost for name, row in rows.items() for part, cost in row.items()}
    return Outcome(benchmark="authorization", figures=figures, tables=[table])


def _callers(certificates: LocalCertificates, token: str) -> Iterator[_Caller]:
    broker = certificates.of(Role.BROKER, _BROKER)
    user = certificates.of(Role.USER, "user-7")
    bearer = (("authorization", f"Bearer {token}"),)
    yield _Caller("plain text", "plain text")
    yield _Caller("certificate of a broker", "tls", broker)
    yield _Caller("certificate of a user with a grant", "tls", user)
    yield _Caller("token", "tokens", broker, metadata=bearer)


def _policy() -> str:
    """Return a policy of many grants, denials and quotas."""
    grants = (f'[[grant]]\nprincipal = "user/user-{n}"\nroles = ["reader"]' for n in range(_OTHERS))
    denied = ", ".join(f'"{number:064x}"' for number in range(_OTHERS))
    of_tokens = '[[tokens.grant]]\nclaim = "team"\nvalue = "data"\nroles = ["reader"]'
    return "\n".join((*grants, of_tokens, f"[deny]\nfingerprints = [{denied}]"))


def _accept_tokens(door: Authenticator) -> str:
    """Make the authenticator accept tokens of an issuer; return one."""
    key = ec.generate_private_key(ec.SECP256R1())
    public: Mapping[str, Any] = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    keys = json.dumps({"keys": [{"kid": "k", **public}]}).encode()

    async def fetch_no_keys() -> None:
        """Return without new keys."""

    door.accept_tokens(TokenVerifier(ISSUER, AUDIENCE), fetch_no_keys)
    door.use_keys(parse_keys(keys, "keys.json"))
    claims: dict[str, object] = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "team": "data"}
    claims["exp"] = int(time.time()) + _TOKEN_S
    return jwt.encode(claims, key, "ES256", {"kid": "k"})


async def _serve(stack: AsyncExitStack, measured: _Measured, tls: TlsFiles) -> Mapping[str, int]:
    """Serve until `stack` ends; return the ports by the credentials that they demand."""
    server = new_server()
    handlers: Any = {"Measure": grpc.unary_unary_rpc_method_handler(measured.handle)}
    service = grpc.method_handlers_generic_handler("bench.Authorization", handlers)
    server.add_generic_rpc_handlers((service,))
    ports = {
        "plain text": server.listen("127.0.0.1:0"),
        "tls": server.listen("127.0.0.1:0", tls),
        "tokens": server.listen("127.0.0.1:0", tls, asks_clients=False),
    }
    await server.start()
    stack.push_async_callback(server.stop, None)
    return ports
