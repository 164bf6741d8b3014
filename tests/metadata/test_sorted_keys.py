"""Sorted keys count a range as a scan would."""

from random import Random

import pytest

from streammeta.controller.metadata.registries import kv
from streammeta.controller.metadata.registries.kv import SortedKeys


@pytest.mark.parametrize("seed", range(5))
def test_a_range_is_counted_as_a_scan_would(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "RUN_KEYS", 4)
    rng = Random(seed)
    keys, plain = SortedKeys(), set[tuple[str, str]]()
    assert keys.count(("", ""), ("z", "")) == 0
    for _ in range(300):
        key = (rng.choice("ab"), f"{rng.randrange(60):02}")
        if key in plain:
            plain.remove(key)
            keys.remove(key)
        else:
            plain.add(key)
            keys.add(key)
        low, high = ((rng.choice("abc"), f"{rng.randrange(61):02}") for _ in range(2))
        assert keys.count(low, high) == sum(low <= each < high for each in plain)
