"""Whatever a request holds, the map answers it or refuses it, and a refusal changes nothing.

`STREAMMETA_FUZZ_SEEDS=100:200` runs those seeds instead of CI's; a failure names its seed.
"""

import dataclasses
import enum
import os
import types
import typing
from random import Random
from typing import Any

import pytest

from controller.errors import ApiError
from controller.metadata.requests import ReadRequest, WriteRequest
from controller.metadata.values import Int64Column, column
from controller.records.codec import decode_records, encode_records
from tests.metadata.map_pair import Pair
from tests.metadata.random_requests import RandomRequests

_FIRST, _LAST = map(int, os.environ.get("STREAMMETA_FUZZ_SEEDS", "0:4").split(":"))
_WRITES, _READS = typing.get_args(WriteRequest), typing.get_args(ReadRequest)
_INT64_MAX = 2**63 - 1
_ODD = (-1, -1, 0, 0, 2**31 - 1, 2**31, _INT64_MAX, _INT64_MAX - 1, -(2**63), -2)
_NODES = (7, 1_000, 1_001)


class _Nonsense:
    """Values of any type a request is made of."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def value(self, kind: Any) -> Any:
        """Return a value of an annotated type."""
        rng = self._rng
        if kind == Int64Column:
            return column(self._integers(self._count()))
        origin = typing.get_origin(kind)
        if origin in (typing.Union, types.UnionType):
            return self.value(rng.choice(typing.get_args(kind)))
        if origin is tuple:
            return self._tuple(typing.get_args(kind))
        if kind is type(None):
            return None
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind, typing.get_type_hints(kind))
        if issubclass(kind, enum.Enum):
            return rng.choice(list(kind))
        return self._plain(kind)

    def _dataclass(self, make: Any, hints: dict[str, Any]) -> Any:
        if _is_table(hints):
            rows = self._count()
            return make(**{name: column(self._integers(rows)) for name in hints})
        return make(**{name: self.value(hint) for name, hint in hints.items()})

    def _integers(self, count: int) -> list[int]:
        return [self._integer() for _ in range(count)]

    def _plain(self, kind: type) -> Any:
        rng = self._rng
        if kind is bool:
            return rng.random() < 0.5
        if kind is int:
            return self._integer()
        if kind is bytes:
            return rng.randbytes(rng.choice((0, 1, 9)))
        assert kind is str, kind
        return rng.choice(("", "a", "b", "7", "-1", "x" * 64, "x" * 65, "\x00", "é" * 600))

    def _tuple(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(parts) == 2 and parts[1] is Ellipsis:
            items = [self.value(parts[0]) for _ in range(self._count())]
            if items and self._rng.random() < 0.1:
                items.append(items[0])
            return tuple(items)
        return tuple(self.value(part) for part in parts)

    def _count(self) -> int:
        return self._rng.choice((0, 1, 1, 1, 2, 2, 3, 40))

    def _integer(self) -> int:
        drawn = self._rng.random()
        if drawn < 0.2:
            return self._rng.choice(_ODD)
        return self._rng.choice(_NODES) if drawn < 0.4 else self._rng.randrange(30)


def _is_table(hints: dict[str, Any]) -> bool:
    """Whether these are columns of one table: what reads them makes them equally long."""
    return all(hint == Int64Column for hint in hints.values())


def _spoilt(request: Any, nonsense: _Nonsense, rng: Random) -> Any:
    """Return a sensible request with one field, at any depth, replaced."""
    hints = typing.get_type_hints(type(request))
    name = rng.choice(list(hints))
    old = getattr(request, name)
    if dataclasses.is_dataclass(old) and rng.random() < 0.8:
        return dataclasses.replace(request, **{name: _spoilt(old, nonsense, rng)})
    if _is_table(hints) and not len(old):
        return request
    if hints[name] == Int64Column and len(old):
        values = old.tolist()
        values[rng.randrange(len(values))] = nonsense.value(int)
        return dataclasses.replace(request, **{name: column(values)})
    if isinstance(old, tuple) and old and dataclasses.is_dataclass(old[0]) and rng.random() < 0.8:
        items = list(old)
        at = rng.randrange(len(items))
        items[at] = _spoilt(items[at], nonsense, rng)
        return dataclasses.replace(request, **{name: tuple(items)})
    return dataclasses.replace(request, **{name: nonsense.value(hints[name])})


def _offer(pair: Pair, request: Any, seed: int) -> None:
    """Let the map judge a write; apply and take back what it decides."""
    cluster_map, where = pair.map, f"seed {seed}: {request}"
    before, offset = cluster_map.state_hash(), cluster_map.applied_end_offset
    try:
        decision = cluster_map.decide(request, pair.now, offset)
    except ApiError:
        assert cluster_map.state_hash() == before, where
        return
    except Exception as error:
        raise AssertionError(f"{where}: {error!r}") from error
    assert cluster_map.state_hash() == before, where
    if not decision.records:
        return
    try:
        cluster_map.apply(offset, decode_records(encode_records(decision.records)))
        cluster_map.undo_to(offset)
    except Exception as error:
        raise AssertionError(f"{where}: {error!r}") from error
    assert cluster_map.state_hash() == before, where


@pytest.mark.parametrize("seed", range(_FIRST, _LAST))
def test_nonsense_is_refused_or_answered_and_taken_back(seed: int) -> None:
    rng = Random(seed)
    pair, requests, nonsense = Pair(), RandomRequests(rng), _Nonsense(rng)
    for request in requests.start(pair.model):
        pair.write(request)
    for _ in range(120):
        pair.write(requests.any(pair.model))
        for _ in range(3):
            _offer(pair, _spoilt(requests.any(pair.model), nonsense, rng), seed)
        _offer(pair, nonsense.value(rng.choice(_WRITES)), seed)
        read = nonsense.value(rng.choice(_READS))
        try:
            pair.map.query(read)
        except ApiError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: {read}: {error!r}") from error
    pair.check()
