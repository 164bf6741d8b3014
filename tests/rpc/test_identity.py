"""Identities stated by URIs, and URIs that state none."""

import pytest

from streammeta.tls.identity import NODE_ID_MAX, IdentityError, Principal, Role, principal_of


@pytest.mark.parametrize(
    ("uri", "principal", "node_id", "text"),
    [
        (
            "streammeta://demo/controller/3",
            Principal("demo", Role.CONTROLLER, "3"),
            3,
            "controller/3",
        ),
        (
            "streammeta://demo/broker/1007",
            Principal("demo", Role.BROKER, "1007"),
            1007,
            "broker/1007",
        ),
        ("streammeta://demo/broker/new", Principal("demo", Role.BROKER, "new"), None, "broker/new"),
        ("streammeta://a_b-1/admin/7", Principal("a_b-1", Role.ADMIN, "7"), None, "admin/7"),
        (
            "streammeta://demo/reconciler/spark@night.1",
            Principal("demo", Role.RECONCILER, "spark@night.1"),
            None,
            "reconciler/spark@night.1",
        ),
    ],
)
def test_a_uri_states_an_identity_and_an_identity_makes_its_uri(
    uri: str, principal: Principal, node_id: int | None, text: str
) -> None:
    assert Principal.parse(uri) == principal
    assert principal.uri == uri
    assert (principal.node_id, str(principal)) == (node_id, text)


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("", "must be streammeta://CLUSTER/ROLE/NAME"),
        ("spiffe://demo/broker/7", "must be streammeta://CLUSTER/ROLE/NAME"),
        ("streammeta://demo/broker", "must be streammeta://CLUSTER/ROLE/NAME"),
        ("streammeta://demo/broker/7/8", "must be streammeta://CLUSTER/ROLE/NAME"),
        ("streammeta://demo/broker/7?x", "node id"),
        ("streammeta://demo/king/7", "role 'king', must be one of controller, broker"),
        ("streammeta://demo/BROKER/7", "role 'BROKER'"),
        ("streammeta://de mo/broker/7", "cluster id 'de mo'"),
        ("streammeta:///broker/7", "cluster id ''"),
        (f"streammeta://{'x' * 65}/broker/7", "cluster id"),
        ("streammeta://demo/broker/07", "node id"),
        ("streammeta://demo/broker/-1", "node id"),
        ("streammeta://demo/broker/\u0663", "node id"),
        (f"streammeta://demo/broker/{NODE_ID_MAX + 1}", "node id"),
        ("streammeta://demo/controller/new", "node id"),
        ("streammeta://demo/admin/", "name ''"),
        ("streammeta://demo/admin/a%2Fb", "name 'a%2Fb'"),
    ],
)
def test_any_other_uri_states_none_and_the_error_says_what_would(uri: str, told: str) -> None:
    with pytest.raises(IdentityError) as raised:
        Principal.parse(uri)
    assert told in str(raised.value)


def test_a_certificate_states_one_identity_whatever_else_it_names() -> None:
    ours = "streammeta://demo/broker/7"
    assert principal_of(["spiffe://example.org/x", ours]).uri == ours
    with pytest.raises(IdentityError):
        principal_of(["spiffe://example.org/x"])
    with pytest.raises(IdentityError, match="found 2"):
        principal_of([ours, "streammeta://demo/admin/alice"])
