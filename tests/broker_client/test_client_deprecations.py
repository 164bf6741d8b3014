"""Former public names of the client work with a warning; other missing names are errors."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest

import streammeta.client
from streammeta.client import SilentObserver
from streammeta.client.deprecations import RENAMED, find_rejection_callback


@pytest.mark.parametrize(("former", "current"), RENAMED.items())
def test_a_former_name_warns_and_gives_the_renamed_class(former: str, current: str) -> None:
    owner, _, name = current.rpartition(".")
    with pytest.warns(DeprecationWarning, match=name):
        found = getattr(streammeta.client, former)
    assert found is getattr(importlib.import_module(owner), name)


def test_a_name_that_never_existed_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NeverThere"):
        getattr(streammeta.client, "NeverThere")  # noqa: B009 - mypy knows that it is missing


class FormerObserver(SilentObserver):
    """Observer of the version before the rename of its method."""

    async def on_refused(self, object_ids: Sequence[int], error: Exception) -> None:
        """Do nothing."""


class ObserverOfBothVersions(FormerObserver):
    """Observer that works with both versions."""

    async def on_rejected(self, object_ids: Sequence[int], error: Exception) -> None:
        """Do nothing."""


class DuckTypedObserver:
    """Observer without a base class of the library."""

    async def on_refused(self, object_ids: Sequence[int], error: Exception) -> None:
        """Do nothing."""


@pytest.mark.parametrize("former", [FormerObserver(), DuckTypedObserver()])
def test_an_observer_with_the_former_method_is_called_with_a_warning(former: Any) -> None:
    with pytest.warns(DeprecationWarning, match="on_rejected"):
        assert find_rejection_callback(former) == former.on_refused


@pytest.mark.parametrize("observer", [SilentObserver(), ObserverOfBothVersions()])
def test_the_current_method_of_an_observer_wins_without_a_warning(observer: Any) -> None:
    assert find_rejection_callback(observer) == observer.on_rejected
