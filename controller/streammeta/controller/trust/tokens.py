"""Bearer tokens: signed by a key of the issuer, issued for this cluster, and valid now.

A token is verified once, and known by its hash until it expires or the keys change. Pure: keys and
times are arguments.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jwt

from streammeta.controller.trust.refusals import BadTokenError, UnknownKeyError
from streammeta.storage.parsing import parse_json

TOKEN_BYTES_MAX = 6_144
"""Maximum size of a token. gRPC rejects calls with more than 8 KiB of metadata unread."""

LEEWAY_S = 30
"""Difference between the clocks of issuer and controller that is borne, in seconds."""

KEY_BITS_MIN = 2_048
"""Smallest modulus of an RSA key."""

_KNOWN_MAX = 1_000
_KEYS_MAX = 100
_OF_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_OF_CURVE = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512", "Ed25519": "EdDSA"}
_REASONS: Sequence[tuple[type[jwt.InvalidTokenError], str]] = (
    (jwt.ExpiredSignatureError, "it has expired"),
    (jwt.ImmatureSignatureError, "it is not valid yet: check the clocks"),
    (jwt.InvalidAudienceError, "it is for another audience"),
    (jwt.InvalidIssuerError, "it is of another issuer"),
    (jwt.MissingRequiredClaimError, "it must have the claims exp, iss and aud"),
    (jwt.InvalidAlgorithmError, "its key is not for the algorithm that it names"),
    (jwt.InvalidSignatureError, "its signature does not match its key"),
)

# Claims of types that nothing is said about, such as a number for the issuer, fail in other ways.
_NO_TOKEN = (jwt.PyJWTError, TypeError, ValueError, OverflowError, RecursionError)


class KeysError(Exception):
    """A text is not a set of keys that verify tokens. The message states the expected form."""


@dataclass(frozen=True, slots=True)
class IssuerKey:
    """A public key and the algorithms that it verifies, never with a shared secret."""

    public: Any
    algorithms: Sequence[str]


def parse_keys(text: bytes, name: str) -> Mapping[str, IssuerKey]:
    """Return the keys of a JWK set by their ids, without keys that verify no tokens.

    `name` is the file or address of the set.

    Raises:
        KeysError: it is not such a set, has no usable key, or an id twice.
    """
    try:
        found = parse_json(text)["keys"]
        if not isinstance(found, list) or not all(isinstance(key, dict) for key in found):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise KeysError(f"{name}: must be a JSON Web Key Set") from None

    keys: dict[str, IssuerKey] = {}
    # The set comes from outside, and every key costs memory and time.
    for entry in found[:_KEYS_MAX]:
        key_id, key = entry.get("kid"), _usable(entry)
        if key is None or not isinstance(key_id, str):
            continue
        if key_id in keys:
            raise KeysError(f"{name}: has key id {key_id!r} twice, must name each key once")
        keys[key_id] = key

    if not keys:
        raise KeysError(
            f"{name}: has no usable key, must have a signature key with a `kid`: RSA of "
            f"{KEY_BITS_MIN} bits or more, P-256, P-384, P-521 or Ed25519"
        )

    return keys


def _usable(found: Mapping[str, Any]) -> IssuerKey | None:
    """Return a key for signatures by one of the algorithms that are taken, else None."""
    if found.get("use", "sig") != "sig":
        return None
    if found.get("kty") == "RSA":
        algorithms: Sequence[str] = _OF_RSA
    else:
        curve = found.get("crv")
        algorithms = [known for name, known in _OF_CURVE.items() if name == curve]

    # A key may be limited to one algorithm, and then verifies no other.
    algorithms = [name for name in algorithms if found.get("alg", name) == name]
    if not algorithms:
        return None
    try:
        public = jwt.PyJWK.from_dict(dict(found), algorithm=algorithms[0]).key
    except (jwt.PyJWTError, ValueError, TypeError):
        return None

    if hasattr(public, "private_numbers") or hasattr(public, "private_bytes"):
        return None  # a signer's: its owner has lost it

    # The length is known only after parsing.
    is_weak = found["kty"] == "RSA" and public.key_size < KEY_BITS_MIN
    return None if is_weak else IssuerKey(public, algorithms)


@dataclass(frozen=True, slots=True)
class Proof:
    """A verified token: SHA-256 of it, its claims, and its end in seconds since 1970."""

    digest: bytes
    claims: Mapping[str, Any]
    expires_at: float


class TokenVerifier:
    """Verifies tokens of one issuer for one audience."""

    def __init__(
        self,
        issuer: str,
        audience: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Begin without keys. `use` sets them."""
        self._issuer = issuer
        self._audience = audience
        self._keys: Mapping[str, IssuerKey] = {}
        self._now = now
        self._known: dict[bytes, Proof] = {}

    def use(self, keys: Mapping[str, IssuerKey]) -> None:
        """Use the issuer's present keys. Tokens signed by other keys become invalid."""
        self._keys = keys
        self._known.clear()

    def seconds_until(self, time_s: float) -> float:
        """Return the time from now until a time since 1970, in seconds."""
        return time_s - self._now()

    def verified(self, token: str) -> Proof:
        """Return what a token proves.

        Raises:
            UnknownKeyError: it is signed by a key that is not known.
            BadTokenError: it is not good, or not here, or not now.
        """
        if len(token) > TOKEN_BYTES_MAX:
            raise BadTokenError(f"it has {len(token)} bytes; may have {TOKEN_BYTES_MAX}")
        # Known by hash, so that no valid token stays in memory.
        digest = hashlib.sha256(token.encode()).digest()
        proof = self._known.get(digest)
        if proof is None:
            proof = self._proof(digest, token)
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[digest] = proof
        # Also for known tokens: validity ends while they are in the cache.
        if proof.expires_at <= self._now():
            del self._known[digest]
            raise BadTokenError("it has expired")
        return proof

    def _proof(self, digest: bytes, token: str) -> Proof:
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
            key = self._keys.get(key_id) if isinstance(key_id, str) else None
            if key is None:
                raise UnknownKeyError("it names no key that its issuer has, by `kid`")

            claims: Mapping[str, Any] = jwt.decode(
                token,
                key=key.public,
                # The algorithms of the key, never the one of the token, which its sender chose.
                algorithms=key.algorithms,
                issuer=self._issuer,
                audience=self._audience,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
            return Proof(digest, claims, float(claims["exp"]) + LEEWAY_S)
        except _NO_TOKEN as error:
            known = (reason for kind, reason in _REASONS if isinstance(error, kind))
            raise BadTokenError(next(known, "it is not a token")) from None
