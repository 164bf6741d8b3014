"""Tokens: which are good, how often one is verified, and where an issuer's keys come from."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from structlog.testing import capture_logs

from streammeta.controller.trust import issuer_keys, tokens
from streammeta.controller.trust.issuer_keys import IssuerKeys, KeysAddress, KeysFile
from streammeta.controller.trust.refusals import BadTokenError, UnknownKeyError
from tests.kit.seeds import seeds
from tests.trust.token_issuer import (
    ALGORITHMS,
    AUDIENCE,
    ISSUER,
    Issuer,
    Publisher,
    as_jwk,
    publishing,
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_token_of_each_algorithm_is_verified(algorithm: str) -> None:
    issuer = Issuer()
    issuer.add("k2", algorithm)
    proof = issuer.verifier().verified(issuer.token(key_id="k2", groups=["oncall"]))
    assert (proof.claims["sub"], proof.claims["groups"]) == ("alice", ["oncall"])


def encoded(part: Any) -> str:
    data = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def forged(header: Any, signature: bytes = b"") -> str:
    """Return a token with good claims and a header of the forger's."""
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": time.time() + 600}
    return f"{encoded(header)}.{encoded(claims)}.{encoded(signature)}"


def signed_by_the_public_key(issuer: Issuer, key_id: str) -> str:
    """Return a token whose shared secret is the public key, as libraries once took it."""
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": time.time() + 600}
    signer = jwt.PyJWS(algorithms=["HS256"])
    signer.unregister_algorithm("HS256")

    class AnyKey(jwt.algorithms.HMACAlgorithm):
        def prepare_key(self, key: Any) -> bytes:
            return bytes(key)

    signer.register_algorithm("HS256", AnyKey(jwt.algorithms.HMACAlgorithm.SHA256))
    payload, headers = json.dumps(claims).encode(), {"kid": key_id}
    return signer.encode(payload, issuer.pem(key_id), "HS256", headers)


def bad_tokens(issuer: Issuer) -> dict[str, tuple[str, str]]:
    """Return tokens that are not good, each with what is said of it."""
    now = time.time()
    good = issuer.token()
    head, body, signature = good.split(".")
    other = Issuer()
    return {
        "expired": (issuer.token(lasts_s=-tokens.LEEWAY_S - 1), "it has expired"),
        "no end": (issuer.token(exp=None), "must have the claims exp, iss and aud"),
        "an end that is no number": (issuer.token(exp="soon"), "it is not a token"),
        "an end without end": (issuer.token(exp=float("inf")), "it is not a token"),
        "an end beyond numbers": (issuer.token(exp=10**400), "it is not a token"),
        "an issuer that is a number": (issuer.token(iss=7), "of another issuer"),
        "a name that is a number": (issuer.token(sub=7), "it is not a token"),
        "not yet valid": (issuer.token(nbf=now + tokens.LEEWAY_S + 60), "is not valid yet"),
        "issued tomorrow": (issuer.token(iat=now + 86_400), "is not valid yet"),
        "another audience": (issuer.token(aud="other"), "for another audience"),
        "other audiences": (issuer.token(aud=["other", "third"]), "for another audience"),
        "no audience": (issuer.token(aud=None), "must have the claims exp, iss and aud"),
        "another issuer": (issuer.token(iss="https://evil.example.org"), "of another issuer"),
        "issuer with a slash more": (issuer.token(iss=f"{ISSUER}/"), "of another issuer"),
        "no issuer": (issuer.token(iss=None), "must have the claims exp, iss and aud"),
        "no signature": (forged({"alg": "none", "kid": "k1"}), "not for the algorithm"),
        "no signature, other case": (forged({"alg": "nOnE", "kid": "k1"}), "not for the algo"),
        "shared secret": (signed_by_the_public_key(issuer, "rsa"), "not for the algorithm"),
        "another algorithm": (
            forged({"alg": "RS256", "kid": "k1"}, b"x" * 64),
            "not for the algorithm",
        ),
        "signature cut off": (f"{head}.{body}.", "signature does not match"),
        "changed claims": (
            f"{head}.{encoded({'sub': 'eve', 'exp': now + 60})}.{signature}",
            "signature does not match",
        ),
        "key of another": (other.token(), "signature does not match"),
        "no key id": (forged({"alg": "ES256"}), "names no key that its issuer has"),
        "unknown key": (other_key(), "names no key that its issuer has"),
        "key id of another type": (forged({"alg": "ES256", "kid": [1]}), "it is not a token"),
        "key of its own": (
            forged({"alg": "ES256", "kid": "k1", "jwk": {"kty": "oct"}}, b"x" * 64),
            "signature does not match",
        ),
        "unknown extension": (
            issuer.token(headers={"crit": ["cap"], "cap": 1}),
            "it is not a token",
        ),
        "two parts": (f"{head}.{body}", "it is not a token"),
        "nothing": ("", "it is not a token"),
        "not ascii": ("tök.en.x", "it is not a token"),
        "no base64": ("%.%.%", "it is not a token"),
        "deep": (f"{encoded(b'[' * 4000)}.{body}.{signature}", "it is not a token"),
        "huge": ("x" * (tokens.TOKEN_BYTES_MAX + 1), f"bytes; may have {tokens.TOKEN_BYTES_MAX}"),
    }


def other_key() -> str:
    other = Issuer()
    other.add("k9")
    return other.token(key_id="k9")


@pytest.mark.parametrize("name", [*bad_tokens(Issuer.with_rsa())])
def test_a_token_that_is_not_good_is_refused_and_told_why(name: str) -> None:
    issuer = Issuer.with_rsa()
    token, why = bad_tokens(issuer)[name]
    verifier = issuer.verifier()
    for _ in range(2):
        with pytest.raises(BadTokenError, match=why) as refused:
            verifier.verified(token)
        for part in token.split("."):
            assert len(part) < 8 or part not in str(refused.value)
    assert verifier.verified(issuer.token()).claims["sub"] == "alice"


@pytest.mark.parametrize("seed", seeds(2, slow=1))
def test_a_token_that_was_changed_anywhere_is_refused(seed: int) -> None:
    rng, issuer = Random(seed), Issuer.with_rsa()
    verifier = issuer.verifier()
    good = [issuer.token(key_id=key_id, groups=["a", "b"]) for key_id in ("k1", "rsa")]
    alphabet = "ABCabc019-_.=~ \u00e4"
    for number in range(300):
        token = rng.choice(good)
        at = rng.randrange(len(token) - 1)  # the last character has bits that mean nothing
        changed = rng.choice(
            (
                token[:at] + rng.choice(alphabet) + token[at + 1 :],
                token[:at] + token[at + 1 :],
                token[:at] + rng.choice(alphabet) + token[at:],
                token[:at],
                ".".join(rng.sample(token.split("."), 3)),
            )
        )
        what = f"seed {seed}, change {number}: {changed} is taken for {token}"
        assert changed in good or is_refused(verifier, changed), what


def is_refused(verifier: tokens.TokenVerifier, token: str) -> bool:
    try:
        verifier.verified(token)
    except BadTokenError:
        return True
    return False


def test_clocks_may_differ_a_little() -> None:
    issuer = Issuer()
    verifier = issuer.verifier()
    assert verifier.verified(issuer.token(lasts_s=5 - tokens.LEEWAY_S))
    assert verifier.verified(issuer.token(nbf=time.time() + tokens.LEEWAY_S - 5))


def test_a_verified_token_is_good_until_its_end_and_no_longer() -> None:
    issuer = Issuer()
    now = time.time()
    verifier = issuer.verifier(lambda: now)
    token = issuer.token(lasts_s=100)
    assert verifier.verified(token)
    now += 100 + tokens.LEEWAY_S - 2
    assert verifier.verified(token)
    now += 3
    with pytest.raises(BadTokenError, match="expired"):
        verifier.verified(token)


def test_a_token_is_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    issuer = Issuer()
    verifier, token = issuer.verifier(), issuer.token()
    verified: list[str] = []
    decode = jwt.decode

    def counted(token: str, **options: Any) -> Any:
        verified.append(token)
        return decode(token, **options)

    monkeypatch.setattr(jwt, "decode", counted)
    for _ in range(3):
        verifier.verified(token)
    assert len(verified) == 1
    verifier.use(issuer.keys)
    verifier.verified(token)
    assert len(verified) == 2


def test_tokens_of_a_removed_key_are_good_no_more_and_those_of_a_new_one_are() -> None:
    issuer = Issuer()
    verifier, old = issuer.verifier(), issuer.token()
    assert verifier.verified(old)
    issuer.add("k2")
    new = issuer.token(key_id="k2")
    with pytest.raises(UnknownKeyError):
        verifier.verified(new)
    issuer.remove("k1")
    verifier.use(issuer.keys)
    assert verifier.verified(new)
    with pytest.raises(UnknownKeyError):
        verifier.verified(old)


def test_many_tokens_take_no_more_than_so_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streammeta.controller.trust.tokens._KNOWN_MAX", 3)
    issuer = Issuer()
    verifier: tokens.TokenVerifier = issuer.verifier()
    for number in range(10):
        verifier.verified(issuer.token(f"user-{number}"))
        assert len(verifier._known) <= 3


def jwk(key_id: str, **replaced: Any) -> dict[str, Any]:
    key = {"kid": key_id, **as_jwk(Issuer().private["k1"].public_key()), **replaced}
    return {name: value for name, value in key.items() if value is not None}


def test_keys_that_sign_no_tokens_are_passed_over() -> None:
    weak = rsa.generate_private_key(65537, 1024).public_key()
    private = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(Issuer.with_rsa().private["rsa"]))
    keys = [
        jwk("good"),
        jwk("for signatures", use="sig", alg="ES256"),
        jwk("for encryption", use="enc"),
        jwk("of another algorithm", alg="ES384"),
        jwk("of no curve", crv="P-192"),
        jwk("of a list of curves", crv=["P-256"]),
        jwk("of a list of kinds", kty=["EC"], crv=None),
        jwk("of a number", x=7),
        jwk("broken", x="AA"),
        jwk("", kid=None),
        {"kid": "shared", "kty": "oct", "k": "c2VjcmV0", "alg": "HS256"},
        {"kid": "none", "kty": "none", "alg": "none"},
        {"kid": "weak", **as_jwk(weak)},
        {"kid": "private", **private},
        {"kid": "empty"},
    ]
    found = tokens.parse_keys(json.dumps({"keys": keys}).encode(), "jwks.json")
    assert {key_id: list(key.algorithms) for key_id, key in found.items()} == {
        "good": ["ES256"],
        "for signatures": ["ES256"],
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "jwks.json: must be a JSON Web Key Set"),
        (b"[]", "must be a JSON Web Key Set"),
        (b'{"keys": 7}', "must be a JSON Web Key Set"),
        (b'{"keys": [7]}', "must be a JSON Web Key Set"),
        (b"\xff", "must be a JSON Web Key Set"),
        (b"[" * 100_000, "must be a JSON Web Key Set"),
        (b'{"keys": []}', "has no usable key"),
        (json.dumps({"keys": [jwk("a"), jwk("a")]}).encode(), "has key id 'a' twice"),
    ],
    ids=["empty", "list", "number", "numbers", "bytes", "deep", "none", "twice"],
)
def test_what_is_wrong_with_a_set_of_keys_is_told(text: bytes, why: str) -> None:
    with pytest.raises(tokens.KeysError, match=why):
        tokens.parse_keys(text, "jwks.json")


DISCOVERY = "/.well-known/openid-configuration"


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with publishing() as publisher:
        yield publisher


def discoverable(publisher: Publisher, of: Issuer, **replaced: Any) -> None:
    said = {"issuer": publisher.address, "jwks_uri": f"{publisher.address}/jwks", **replaced}
    publisher.answers[DISCOVERY] = (200, json.dumps(said).encode())
    publisher.answers["/jwks"] = (200, of.jwks)


class Taken:
    """The keys as they were last taken."""

    def __init__(self) -> None:
        self.ids: list[list[str]] = []

    def __call__(self, keys: Mapping[str, tokens.IssuerKey]) -> None:
        self.ids.append(sorted(keys))


async def read_once(keys: IssuerKeys) -> None:
    await asyncio.wait_for(keys.read_again(), 60)


async def test_keys_are_found_by_the_issuers_own_word(publisher: Publisher) -> None:
    discoverable(publisher, Issuer())
    taken = Taken()
    await read_once(IssuerKeys(KeysAddress(publisher.address), taken))
    assert publisher.asked == [DISCOVERY, "/jwks"]
    assert taken.ids == [["k1"]]


async def test_keys_at_a_known_address_need_no_discovery(publisher: Publisher) -> None:
    publisher.answers["/jwks"] = (200, Issuer().jwks)
    taken = Taken()
    address = KeysAddress("https://login.example.org", f"{publisher.address}/jwks")
    await read_once(IssuerKeys(address, taken))
    assert (publisher.asked, taken.ids) == (["/jwks"], [["k1"]])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"issuer": "https://evil.example.org"}, "names the issuer 'https://evil.example.org'"),
        ({"issuer": None}, "names the issuer None"),
        ({"jwks_uri": "http://evil.example.org/jwks"}, "jwks_uri: .* must begin with https://"),
        ({"jwks_uri": "file:///etc/passwd"}, "jwks_uri: .* must begin with https://"),
        ({"jwks_uri": "http://127.0.0.1@evil.example.org/"}, "must begin with https://"),
        ({"jwks_uri": 7}, "jwks_uri: 7, must begin"),
    ],
)
def test_what_an_issuer_may_not_say_is_refused(
    publisher: Publisher, said: dict[str, Any], why: str
) -> None:
    discoverable(publisher, Issuer(), **said)
    with pytest.raises(tokens.KeysError, match=why):
        KeysAddress(publisher.address).read()
    assert publisher.asked == [DISCOVERY]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((500, b""), "can't be fetched: HTTP Error 500"),
        ((302, b""), "can't be fetched: HTTP Error 302"),
        ((200, b"[]"), "must be a JSON object with issuer and jwks_uri"),
        ((200, b"{}"), "must be a JSON object with issuer and jwks_uri"),
        ((200, b"\xff"), "must be a JSON object with issuer and jwks_uri"),
        ((200, b" " * ((1 << 20) + 1)), "answers more than 1048576 bytes"),
    ],
    ids=["failure", "elsewhere", "list", "empty", "bytes", "huge"],
)
def test_answers_that_are_none_are_told(
    publisher: Publisher, answer: tuple[int, bytes], why: str
) -> None:
    publisher.answers[DISCOVERY] = answer
    publisher.headers["location"] = f"{publisher.address}/elsewhere"
    with pytest.raises(tokens.KeysError, match=why):
        KeysAddress(publisher.address).read()
    assert publisher.asked == [DISCOVERY], "nothing is followed"


def test_an_issuer_that_answers_slowly_is_left(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "TIMEOUT_S", 0.2)
    publisher.answers["/jwks"] = (200, Issuer().jwks)
    for pause_s, why in ((0.02, "answers too slowly"), (1.0, "can't be fetched: timed out")):
        publisher.pause_s = pause_s
        with pytest.raises(tokens.KeysError, match=why):
            KeysAddress("x", f"{publisher.address}/jwks").read()


async def test_a_flood_of_unknown_keys_asks_the_issuer_once(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.answers["/jwks"] = (200, Issuer().jwks)
    keys = IssuerKeys(KeysAddress("x", f"{publisher.address}/jwks"), Taken())
    await asyncio.wait_for(asyncio.gather(*(keys.read_again() for _ in range(500))), 60)
    for _ in range(500):
        await keys.read_again()
    assert publisher.asked == ["/jwks"]
    monkeypatch.setattr(issuer_keys, "READ_AGAIN_S", 0.0)
    await read_once(keys)
    assert publisher.asked == ["/jwks"] * 2


async def test_a_caller_that_leaves_does_not_take_the_answer_from_the_others(
    publisher: Publisher,
) -> None:
    publisher.answers["/jwks"] = (200, Issuer().jwks)
    taken = Taken()
    keys = IssuerKeys(KeysAddress("x", f"{publisher.address}/jwks"), taken)
    first, second = (asyncio.create_task(keys.read_again()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 60)
    assert taken.ids == [["k1"]]


async def test_keys_stay_while_the_issuer_is_out_of_reach_and_that_is_logged_once(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "READ_AGAIN_S", 0.0)
    publisher.answers["/jwks"] = (200, Issuer().jwks)
    taken = Taken()
    keys = IssuerKeys(KeysAddress("x", f"{publisher.address}/jwks"), taken)
    answers = [(200, Issuer().jwks), (500, b""), (500, b""), (200, b'{"keys": []}'), (500, b"")]
    with capture_logs() as logs:
        for answer in answers:
            publisher.answers["/jwks"] = answer
            await read_once(keys)
    assert taken.ids == [["k1"]]
    events = [log["event"] for log in logs]
    assert events == ["token_keys_read", *["token_keys_not_read"] * 3]


async def test_a_defect_in_reading_keys_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> bytes:
        raise RuntimeError("told to fail")

    monkeypatch.setattr(Path, "read_bytes", fail)
    keys = IssuerKeys(KeysFile(Path("jwks.json"), interval_s=3600), Taken())
    with capture_logs() as logs:
        await read_once(keys)
    assert [log["event"] for log in logs] == ["token_keys_not_read"]


async def test_a_file_of_keys_is_read_again_when_it_changes(tmp_path: Path) -> None:
    issuer, file = Issuer(), tmp_path / "jwks.json"
    file.write_bytes(issuer.jwks)
    changed = asyncio.Event()
    taken = Taken()

    def take(keys: Mapping[str, tokens.IssuerKey]) -> None:
        taken(keys)
        changed.set()

    source = KeysFile(file, interval_s=0.01)
    keys = IssuerKeys(source, take)
    keys.take(source.read())
    changed.clear()
    running = asyncio.create_task(keys.run())
    issuer.add("k2")
    issuer.remove("k1")
    file.write_bytes(issuer.jwks)
    await asyncio.wait_for(changed.wait(), 60)
    running.cancel()
    assert taken.ids == [["k1"], ["k2"]]


async def test_keys_are_read_at_once_when_that_is_asked_for(tmp_path: Path) -> None:
    issuer, file = Issuer(), tmp_path / "jwks.json"
    file.write_bytes(issuer.jwks)
    read = asyncio.Queue[Mapping[str, tokens.IssuerKey]]()
    keys = IssuerKeys(KeysFile(file, interval_s=3600), read.put_nowait)
    running = asyncio.create_task(keys.run())
    assert set(await asyncio.wait_for(read.get(), 60)) == {"k1"}
    issuer.add("k2")
    file.write_bytes(issuer.jwks)
    keys.look_now()
    assert set(await asyncio.wait_for(read.get(), 60)) == {"k1", "k2"}
    running.cancel()


def test_a_file_of_keys_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(tokens.KeysError, match=r"jwks.json"):
        KeysFile(tmp_path / "jwks.json", 5).read()
