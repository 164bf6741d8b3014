"""Fixtures of attacks: those of trust, and a cluster that is attacked."""

from collections.abc import Iterator

import pytest

from tests.attack.scene import Scene, attackable
from tests.kit.certificates import Authority
from tests.trust.conftest import authority

__all__ = ["authority"]


@pytest.fixture(scope="module", params=["plain text", "tls"])
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[Scene]:
    root = tmp_path_factory.mktemp("attacked")
    with attackable(root, authority if request.param == "tls" else None) as made:
        yield made
