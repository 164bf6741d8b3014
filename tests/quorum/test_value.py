"""Values: compared and hashed by their fields; the type checker alone keeps them as they are."""

from dataclasses import field, replace

import pytest

from streammeta.controller.fast_dataclass import value


@value()
class Point:
    x: int
    y: int = 0
    label: str = field(default="", compare=False)


@value(kw_only=True)
class Named:
    name: str


def test_values_are_compared_and_hashed_by_their_fields() -> None:
    assert Point(1, 2) == Point(1, 2, "there")
    assert Point(1, 2) != Point(2, 1)
    assert {Point(1): "a"}[Point(1, 0)] == "a"
    assert replace(Point(1, 2), y=3) == Point(1, 3)


def test_values_have_their_fields_and_no_others() -> None:
    with pytest.raises(AttributeError):
        Point(1).z = 2  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        Named("a")  # type: ignore[call-arg]


def test_the_type_checker_refuses_an_assignment_to_a_field() -> None:
    point = Point(1)
    point.x = 2  # type: ignore[misc] # an ignore without an error is one for the type checker
    assert point.x == 2, "nothing is checked at run time, which is what values are for"
