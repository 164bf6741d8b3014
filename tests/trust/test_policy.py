"""The policy: what its text adds and denies, and what is said of a bad one, with its line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cryptography import x509
from structlog.testing import capture_logs

from streammeta.cli.framework.output import run_cli
from streammeta.cli.root import cli
from streammeta.controller.trust import policy_file
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.controller.trust.policy import Policy, PolicyError, Quota, parse_policy
from streammeta.controller.trust.policy_file import PolicyFile
from streammeta.controller.trust.refusals import NoIdentityError, RoleLacksCallError
from streammeta.tls.identity import Principal, Role
from tests.kit.certificates import Authority
from tests.kit.real_cluster import controller_command
from tests.trust.trusted_server import CLUSTER, ShownContext, shown

TAKE_SNAPSHOT = "streammeta.v1.AdminService.TakeSnapshot"
COMMIT = "streammeta.v1.ObjectService.CommitStreamSetObject"
READER = Principal(CLUSTER, Role.READER, "spark")
BROKER = Principal(CLUSTER, Role.BROKER, "1007")
TWO_GRANTS = """[[grant]]
principal = "reader/a"
roles = []

[[grant]]
principal = "reader/b"
roles = ["broker"]
"""
LEAF = "0" * 63 + "1"


def policy(text: str) -> Policy:
    return parse_policy(text, CLUSTER, "policy.toml")


def foreign(**names: str) -> ShownContext:
    """Return the context of a certificate of another authority's making."""
    uri = (names["uri"],) if "uri" in names else ()
    proven = dict(shown(*uri, certificate=repr(names).encode()).proven)
    proven["peer_dns"] = [names["dns"].encode()] if "dns" in names else []
    proven["x509_common_name"] = [names["cn"].encode()] if "cn" in names else []
    return ShownContext(proven)


def test_certificates_of_others_stand_for_principals() -> None:
    authenticator = Authenticator(
        CLUSTER,
        policy(
            """
            [principals]
            "uri:spiffe://example.org/kafka/7" = "broker/1007"
            "dns:c3.example.org" = "controller/3"
            "cn:alice" = "admin/alice"
            """
        ),
    )
    for names, principal in (
        ({"uri": "spiffe://example.org/kafka/7"}, "broker/1007"),
        ({"dns": "c3.example.org"}, "controller/3"),
        ({"cn": "alice", "dns": "laptop"}, "admin/alice"),
    ):
        method = "streammeta.v1.AdminService.DescribeCluster"
        assert authenticator.authenticate(method, foreign(**names)).name == principal
    assert (
        authenticator.authenticate(COMMIT, foreign(uri="spiffe://example.org/kafka/7")).held_to
        == BROKER
    )
    for names, why in (
        ({"cn": "bob"}, "found none"),
        ({"cn": "alice", "dns": "c3.example.org"}, "found admin/alice, controller/3"),
        ({"uri": "streammeta://test/lord/x", "cn": "alice"}, "role 'lord'"),
    ):
        with pytest.raises(NoIdentityError, match=why):
            authenticator.authenticate(COMMIT, foreign(**names))


def test_grants_add_roles() -> None:
    text = """
        [[grant]]
        principal = "reader/spark"
        roles = ["backup"]
        [[grant]]
        principal = "broker/*"
        roles = ["compactor"]
    """
    authenticator = Authenticator(CLUSTER, policy(text))
    assert authenticator.authenticate(TAKE_SNAPSHOT, shown(READER)).roles == {
        Role.READER,
        Role.BACKUP,
    }
    with pytest.raises(RoleLacksCallError):
        authenticator.authenticate(TAKE_SNAPSHOT, shown(Principal(CLUSTER, Role.READER, "other")))
    # As a compactor it speaks for any node, in a compactor's calls.
    assert authenticator.authenticate(COMMIT, shown(BROKER)).held_to is None
    assert (
        authenticator.authenticate("streammeta.v1.StreamService.OpenStreams", shown(BROKER)).held_to
        == BROKER
    )
    new = Principal(CLUSTER, Role.BROKER, "new")
    with pytest.raises(RoleLacksCallError):
        authenticator.authenticate("streammeta.v1.NodeService.RegisterNode", shown(new))


def test_a_denied_certificate_is_no_way_in() -> None:
    authenticator, context = Authenticator(CLUSTER), shown(READER)
    fingerprint = authenticator.authenticate("grpc.health.v1.Health.Check", context).fingerprint
    spelled = ":".join(fingerprint[at : at + 2] for at in range(0, 64, 2)).upper()
    authenticator.use_policy(policy(f'[deny]\nfingerprints = ["{spelled}"]'))
    with pytest.raises(NoIdentityError, match="reader/spark"):
        authenticator.authenticate("grpc.health.v1.Health.Check", context)
    authenticator.use_policy(Policy())
    assert authenticator.authenticate("grpc.health.v1.Health.Check", context).principal == READER


def test_callers_are_denied_by_name_and_certificates_by_serial_number(
    authority: Authority,
) -> None:
    first, second = (
        authority.issue("reader/spark", serial=serial).certificate.read_bytes() for serial in (0, 1)
    )
    contexts = [shown_pem(READER, pem) for pem in (first, second)]
    serial = f"{x509.load_pem_x509_certificate(first).serial_number:x}"
    for text, refused in (
        (f'serials = ["{serial}"]', [True, False]),
        (f'serials = ["00:{serial.upper()}"]', [True, False]),
        ('serials = ["7"]', [False, False]),
        ('principals = ["reader/spark"]', [True, True]),
        ('principals = ["reader/*"]', [True, True]),
        ('principals = ["reader/other", "broker/*"]', [False, False]),
    ):
        authenticator = Authenticator(CLUSTER, policy(f"[deny]\n{text}"))
        assert [is_denied(authenticator, context) for context in contexts] == refused, text
    unreadable = shown(READER)
    assert is_denied(Authenticator(CLUSTER, policy('[deny]\nserials = ["7"]')), unreadable)


def shown_pem(principal: Principal, pem: bytes) -> ShownContext:
    return ShownContext({**shown(principal).proven, "x509_pem_cert": [pem]})


def is_denied(authenticator: Authenticator, context: ShownContext) -> bool:
    try:
        authenticator.authenticate("grpc.health.v1.Health.Check", context)
    except NoIdentityError as error:
        return "is denied by the policy" in str(error)
    return False


def test_namespaces_belong_to_those_of_the_longest_prefix() -> None:
    found = policy(
        """
        [[namespace]]
        prefix = ""
        principals = []
        [[namespace]]
        prefix = "orders."
        principals = ["broker/*"]
        [[namespace]]
        prefix = "orders.eu."
        principals = ["broker/1007", "reader/spark"]
        """
    )
    owners = {
        name: [f"{owner.role}/{owner.name}" for owner in found.owners_of(name) or ()]
        for name in ("x", "orders.us", "orders.eu.x", "_streammeta/x")
    }
    assert owners == {
        "x": [],
        "orders.us": ["broker/*"],
        "orders.eu.x": ["broker/1007", "reader/spark"],
        "_streammeta/x": [],
    }
    assert Policy().owners_of("x") is None
    assert Policy().owners_of("_streammeta/x") == ()


def test_a_quota_is_the_principals_or_its_roles() -> None:
    found = policy(
        """
        [[quota]]
        principal = "broker/*"
        requests_per_s = 1000
        [[quota]]
        principal = "broker/1007"
        rows_per_s = 0
        """
    )
    assert found.quota_of(BROKER) == Quota(rows_per_s=0)
    assert found.quota_of(Principal(CLUSTER, Role.BROKER, "1")) == Quota(requests_per_s=1000)
    assert found.quota_of(READER) == Quota()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = = 1", r"policy.toml: .*line 1"),
        ("\n[principal]\n", "policy.toml, line 2: principal: unknown. must be one of deny, grant"),
        ('[principals]\n"x" = "a/b"', "line 2: x: must begin with uri:, dns: or cn:"),
        ('[principals]\n"uri:streammeta://a/b/c" = "a/b"', "line 2: .* remove this entry"),
        ('[principals]\n"cn:x" = "broker/x"', "line 2: cn:x: 'broker/x'. must be ROLE/NAME"),
        ('[[grant]]\nprincipal = "reader/a"', r"line 1: \[\[grant\]\]: has no roles; give it"),
        (
            TWO_GRANTS,
            "line 7: roles: 'broker'. must be one of compactor, reader, reconciler",
        ),
        ('[[grant]]\nprincipal = "reader/a"\nrole = "x"\nroles = []', "line 3: role: unknown"),
        ('[[grant]]\nprincipal = 7\nroles = []', "line 2: principal: 7. must be ROLE/NAME"),
        ('[[grant]]\nprincipal = "reader/a"\nroles = "admin"', "line 3: roles: must be a list"),
        ("grant = 1", "line 1: grant: must be tables"),
        ("[deny]\nfingerprint = []", "line 2: fingerprint: unknown. must be one of fingerprints,"),
        ('[deny]\nserials = ["0x7"]', "line 2: serials: '0x7'. must be a certificate's serial"),
        ('[deny]\nprincipals = ["broker"]', "line 2: principals: 'broker'. must be ROLE/NAME"),
        ("tokens = 1", r"line 1: tokens: must be a table, \[tokens\]"),
        ("[tokens]\nclaim = 1", "line 2: claim: unknown. must be one of name_claim, grant"),
        ("[tokens]\nname_claim = 1", "line 2: name_claim: 1. must be a text"),
        (
            '[[tokens.grant]]\nclaim = "groups"\nvalue = "ops"\nroles = ["compactor"]',
            "line 4: roles: 'compactor'. must be one of reader, reconciler, backup, admin, monit",
        ),
        (
            '[[tokens.grant]]\nclaim = "groups"\nvalue = 7\nroles = []',
            "line 3: value: 7. must be a text",
        ),
        ('[[tokens.grant]]\nclaim = "groups"', r"line 1: \[\[tokens.grant\]\]: has no value"),
        ('[deny]\nfingerprints = [\n"12"]', "line 2: fingerprints: '12'. must be a SHA-256"),
        ("deny = 1", "line 1: deny: must be a table"),
        (
            '[[namespace]]\nprefix = "_streammeta/x"\nprincipals = []',
            "line 2: prefix: '_streammeta/x'; is reserved",
        ),
        (
            '[[namespace]]\nprefix = "a"\nprincipals = []\n' * 2,
            "line 5: prefix: 'a'. must be a text, given once",
        ),
        ('[[quota]]\nprincipal = "reader/*"\nwatches = -1', "line 3: watches: -1. must be a numb"),
        ('[[quota]]\nprincipal = "reader/*"\nwatch = 1', "line 3: watch: unknown. must be one of"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(text: str, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        policy(text)


def test_a_broken_policy_is_refused_at_start(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    with pytest.raises(PolicyError, match="be read"):
        PolicyFile(file, CLUSTER)
    file.write_text("[deny]\nfingerprints = 7\n")
    with pytest.raises(PolicyError, match=r"policy.toml.*fingerprints"):
        PolicyFile(file, CLUSTER)


DEEP = (
    "x = " + "[" * 100_000,
    "x = " + "[" * 300 + "]" * 300,
    ".".join("a" * 5_000) + " = 1",
    "x = " + "1" * 5_000,
    "[" + ".".join("a" * 5_000) + "]",
)


@pytest.mark.parametrize("text", DEEP, ids=range(len(DEEP)))
def test_a_policy_that_no_parser_stands_leaves_the_old_one_and_names_the_file(
    text: str, tmp_path: Path
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("")
    found = PolicyFile(file, CLUSTER)
    before = found.current
    with capture_logs() as logs:
        found.take(text)
    assert found.current is before
    assert [(log["event"], str(file) in log["reason"]) for log in logs] == [
        ("policy_refused", True)
    ]
    with pytest.raises(PolicyError, match=r"policy\.toml"):
        parse_policy(text, CLUSTER, "policy.toml")


def test_a_defect_of_the_reader_leaves_the_old_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("")
    found = PolicyFile(file, CLUSTER)
    monkeypatch.setattr(policy_file, "parse_policy", lambda *_: int("no number"))
    with capture_logs() as logs:
        found.take("[deny]")
    assert [log["event"] for log in logs] == ["policy_refused"]
    assert str(file) in logs[0]["reason"]


def test_a_broken_policy_at_reload_leaves_the_old_one_and_is_logged_once(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    good = f'[deny]\nfingerprints = ["{LEAF}"]'
    file.write_text(good)
    found = PolicyFile(file, CLUSTER)
    taken: list[Policy] = []
    found.on_change(taken.append)
    audited: list[tuple[str, bool]] = []
    found.told = lambda name, reason, _: audited.append((name, bool(reason)))
    with capture_logs() as logs:
        for text in ("[deny]\nfingerprints = 7", "[deny]\nfingerprints = 7", good, "x", "x", ""):
            found.take(text)
        found.take(PolicyError("gone"))
        found.take(PolicyError("gone"))
    events = [(log["event"], log.get("reason", "")[-30:]) for log in logs]
    assert [event for event, _ in events] == [
        "policy_refused", "policy_refused", "policy_loaded", "policy_refused",
    ]  # fmt: skip
    assert audited == [("policy.reload", event == "policy_refused") for event, _ in events]
    assert taken == [found.current] == [parse_policy("", CLUSTER, "")]


async def test_the_file_is_read_again_when_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("")
    found = PolicyFile(file, CLUSTER)
    changed: asyncio.Future[Policy] = asyncio.get_running_loop().create_future()
    found.on_change(changed.set_result)
    running = asyncio.create_task(found.run())
    file.write_text(f'[deny]\nfingerprints = ["{LEAF}"]')
    found.look_now()
    assert (await asyncio.wait_for(changed, 60)).denials.fingerprints == {LEAF}
    running.cancel()


def test_a_controller_does_not_start_with_a_broken_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("[deny]\nfingerprints = 7\n")
    words = controller_command(tmp_path, policy=str(file))
    assert run_cli(cli, [*words[2:], "--check-config"]) != 0
    assert f"{file}, line 2: fingerprints: must be a list of texts" in capsys.readouterr().err
