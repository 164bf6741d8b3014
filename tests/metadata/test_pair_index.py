"""An index by two columns finds what was inserted and not removed, also while it moves."""

from random import Random

import numpy as np
import pytest

from streammeta.controller.metadata.tables import pair_index
from streammeta.controller.metadata.tables.pair_index import PairIndex
from streammeta.controller.metadata.tables.tables import Table, Undo


@pytest.mark.parametrize("seed", range(6))
def test_an_index_finds_what_a_dictionary_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    # Few enough that many insertions pass while the rows move.
    monkeypatch.setattr(pair_index, "_MOVED_MIN", rng.choice((1, 64)))
    monkeypatch.setattr(pair_index, "_MOVED_PER_ROW", rng.choice((8, 1)))
    table = Table({"a": np.int32, "b": np.int64})
    index = PairIndex(table, "a", "b")
    known: dict[tuple[int, int], int] = {}
    moving = 0
    for step in range(150):
        new = sorted({(rng.randrange(50), rng.randrange(2**40)) for _ in range(rng.randint(1, 90))})
        rows = np.arange(len(table), len(table) + len(new))
        table.append(len(new), Undo())
        for name, values in zip("ab", zip(*new, strict=True), strict=True):
            table.write(name, rows, np.array(values))
        index.insert(rows)
        known.update(zip(new, rows.tolist(), strict=True))
        gone = rng.sample(sorted(known), rng.randrange(min(60, len(known))))
        if gone:
            index.remove(np.array([known.pop(pair) for pair in gone]))
        moving += len(index._old_slots) > 0
        asked = np.array([*known, *gone, (1, 2**41)])
        found = index.find(asked[:, 0], asked[:, 1]).tolist()
        wanted = [*known.values(), *[-1] * (len(gone) + 1)]
        assert found == wanted, f"seed {seed}, step {step}"
    assert moving, f"seed {seed}: no look while rows moved"
