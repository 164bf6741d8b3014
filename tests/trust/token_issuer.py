"""An issuer of tokens: its keys by id, tokens signed by them, and a server that publishes keys."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from streammeta.controller.trust.tokens import IssuerKey, TokenVerifier, parse_keys
from tests.trust.trusted_server import ShownContext

ISSUER = "https://login.example.org"
AUDIENCE = "streammeta"

_RSA_2048 = rsa.generate_private_key(65537, 2048)
_MADE: Mapping[str, Any] = {
    "RS256": lambda: _RSA_2048,
    "PS512": lambda: _RSA_2048,
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}
ALGORITHMS = tuple(_MADE)


def as_jwk(public: Any) -> dict[str, Any]:
    """Return a public key as a JSON Web Key, without its id."""
    kinds = {rsa.RSAPublicKey: RSAAlgorithm, ec.EllipticCurvePublicKey: ECAlgorithm}
    known: Any = next((made for kind, made in kinds.items() if isinstance(public, kind)), None)
    found: dict[str, Any] = (known or OKPAlgorithm).to_jwk(public, as_dict=True)
    return found


class Issuer:
    """Signs tokens by any of its keys."""

    def __init__(self, name: str = ISSUER) -> None:
        self.name = name
        self.private: dict[str, Any] = {}
        self.algorithms: dict[str, str] = {}
        self.add("k1")

    @classmethod
    def with_rsa(cls) -> Issuer:
        """Return an issuer that has an RSA key, `rsa`, as well."""
        made = cls()
        made.add("rsa", "RS256")
        return made

    def add(self, key_id: str, algorithm: str = "ES256") -> None:
        self.private[key_id] = _MADE[algorithm]()
        self.algorithms[key_id] = algorithm

    def remove(self, key_id: str) -> None:
        del self.private[key_id]

    @property
    def jwks(self) -> bytes:
        keys = [
            {"kid": key_id, **as_jwk(private.public_key())}
            for key_id, private in self.private.items()
        ]
        return json.dumps({"keys": keys}).encode()

    @property
    def keys(self) -> Mapping[str, IssuerKey]:
        return parse_keys(self.jwks, "jwks.json")

    def pem(self, key_id: str) -> bytes:
        """Return a public key."""
        public = self.private[key_id].public_key()
        data: bytes = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return data

    def token(
        self,
        name: str = "alice",
        *,
        key_id: str = "k1",
        lasts_s: float = 600,
        headers: Mapping[str, Any] | None = None,
        **claims: Any,
    ) -> str:
        """Return a good token, but for what `claims` replace; None leaves a claim out."""
        standard = {
            "iss": self.name,
            "aud": AUDIENCE,
            "sub": name,
            "exp": time.time() + lasts_s,
        }
        said = {key: value for key, value in {**standard, **claims}.items() if value is not None}
        known = {"kid": key_id, **(headers or {})}
        payload, algorithm = json.dumps(said).encode(), self.algorithms[key_id]
        return jwt.PyJWS().encode(payload, self.private[key_id], algorithm, known)

    def verifier(self, now: Any = time.time) -> TokenVerifier:
        """Return a verifier that knows the keys of this moment."""
        made = TokenVerifier(self.name, AUDIENCE, now)
        made.use(self.keys)
        return made


def bearing(*tokens: str, scheme: str = "Bearer") -> ShownContext:
    """Return the context of a call over TLS without a certificate, with these tokens."""
    shown = tuple(("authorization", f"{scheme} {token}") for token in tokens)
    return ShownContext({"transport_security_type": [b"ssl"]}, shown)


class Publisher:
    """What a server on loopback answers by path; `asked` are the paths that it was asked for."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.headers: dict[str, str] = {}
        self.asked: list[str] = []
        self.pause_s = 0.0
        """Time after each byte."""
        self.stopped = Event()
        self.address = ""


@contextmanager
def publishing() -> Iterator[Publisher]:
    """Run a server on loopback."""
    publisher = Publisher()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            publisher.asked.append(self.path)
            status, body = publisher.answers.get(self.path, (404, b""))
            self.send_response(status)
            for name, value in publisher.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self._write(body)

        def _write(self, body: bytes) -> None:
            if not publisher.pause_s:
                self.wfile.write(body)
                return
            for position in range(len(body)):
                self.wfile.write(body[position : position + 1])
                publisher.stopped.wait(publisher.pause_s)

        def log_message(self, *_: Any) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    publisher.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield publisher
    finally:
        publisher.stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()
