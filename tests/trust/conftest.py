"""An authority of the whole session, which issues certificates of any role."""

from __future__ import annotations

import pytest

from tests.kit.certificates import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Give an authority that is not trusted."""
    return Authority(tmp_path_factory.mktemp("stranger"), "theirs")
