"""Former public names of the client work with a warning; other missing names are errors."""

from __future__ import annotations

import importlib

import pytest

import streammeta.client
from streammeta.client.deprecations import RENAMED


@pytest.mark.parametrize(("former", "current"), RENAMED.items())
def test_a_former_name_warns_and_gives_the_renamed_class(former: str, current: str) -> None:
    owner, _, name = current.rpartition(".")
    with pytest.warns(DeprecationWarning, match=name):
        found = getattr(streammeta.client, former)
    assert found is getattr(importlib.import_module(owner), name)


def test_a_name_that_never_existed_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NeverThere"):
        getattr(streammeta.client, "NeverThere")  # noqa: B009 - mypy knows that it is missing
