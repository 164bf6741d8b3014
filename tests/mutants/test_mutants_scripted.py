"""Scripts for bugs that are too rare for seeds: each is what catches a mutant."""

from dataclasses import replace

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.quorum.messages import EpochEnd, FetchRequest
from tests.quorum.core_harness import Lone, batch


def test_an_answer_to_the_life_before_the_restart_is_not_taken() -> None:
    """Request numbers begin anew with each process, so the number alone proves nothing."""
    node = Lone()
    node.begin(1, 4)
    first = node.only(FetchRequest)
    earlier = replace(first, header=replace(first.header, incarnation=first.header.incarnation + 1))
    node.feed(first, batch(0, 4, b"a"))
    node.flush()
    second = node.only(FetchRequest)
    late = replace(earlier, header=replace(earlier.header, request_id=second.header.request_id))
    node.feed(late, diverging=EpochEnd(Epoch(0), EndOffset(0)))
    assert not node.effects
    assert node.core.log.end_offset == 1
