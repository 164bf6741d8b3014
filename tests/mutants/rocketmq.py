"""Mutants of RocketMQ's tiered storage: dispatch, chunks in a bucket, and expiry."""

from tests.mutants.mutant import Mutant, Tested

_DISPATCH = "tests/brokers/test_rocketmq_dispatch.py"

ROCKETMQ = (
    # ---- dispatch ----
    Mutant(
        "message-stored-at-another-offset",
        "Messages are stored under the offsets that were asked for, not under their own.",
        "a local store that deletes messages between the look at its first offset and the read",
        """
        streammeta.brokers.rocketmq.dispatch:
        - if queue_offset_of(message.data) != offset + len(found):
        + if queue_offset_of(message.data) < 0:
              break
          found.append(message)
        """,
        Tested(f"{_DISPATCH}::test_messages_that_vanish_under_a_read_are_a_hole"),
    ),
    Mutant(
        "dispatch-repeats-without-progress",
        "A caller that dispatches until nothing is left never ends, and moves nothing.",
        "a message larger than a segment of the commit log",
        """
        streammeta.brokers.rocketmq.dispatch:
        - return done and has_moved and waiting > 0 and (force or self._is_due(file.append_offset))
        + return done and waiting > 0 and (force or self._is_due(file.append_offset))
        """,
        Tested(f"{_DISPATCH}::test_a_message_of_another_offset_is_not_stored"),
    ),
    Mutant(
        "empty-read-repeated",
        "A read that returns nothing is repeated at once, and the event loop stands still.",
        "a local store that deletes messages between the look at its first offset and the read",
        """
        streammeta.brokers.rocketmq.dispatch:
          if not messages:
        -     return
        +     continue
        """,
        Tested(f"{_DISPATCH}::test_messages_that_vanish_under_a_read_are_a_hole"),
    ),
    Mutant(
        "group-holds-the-event-loop",
        "A group of thousands of messages is moved without a pause.",
        "a loop whose awaits never suspend",
        """
        streammeta.brokers.rocketmq.dispatch:
        - await asyncio.sleep(0)
        """,
        Tested(f"{_DISPATCH}::test_other_tasks_run_while_a_large_group_is_moved"),
    ),
    Mutant(
        "message-appended-before-its-item-has-room",
        "While items can't be committed the same message is appended again and again.",
        "two appends of which the second one fails",
        """
        streammeta.brokers.rocketmq.message_file:
        - result = await self.consume_queue.make_room(ITEM_SIZE)
        - if result is not AppendResult.SUCCESS:
        -     return result
          result = await self.append_commit_log(message)
        """,
        Tested(f"{_DISPATCH}::test_a_refused_message_ends_the_loop_and_is_appended_once"),
    ),
    Mutant(
        "message-larger-than-a-segment-refused",
        "A queue stops for ever at a message that is larger than a segment.",
        "the peer's dispatch adds an empty segment at each try",
        """
        streammeta.brokers.rocketmq.message_file:
        - takes_larger = True
        + takes_larger = False
        """,
        Tested(f"{_DISPATCH}::test_a_message_larger_than_a_segment_has_one_of_its_own"),
    ),
    Mutant(
        "unknown-offset-is-the-smallest",
        "A queue that the local store does not know begins at -1, though it is tiered.",
        "RocketMQ 10193",
        """
        streammeta.brokers.rocketmq.tiered_view:
        - (offset for offset in (local, tiered) if offset is not None and offset >= 0), default=-1
        + (offset for offset in (local, tiered) if offset is not None), default=-1
        """,
        Tested(f"{_DISPATCH}::test_a_tier_without_messages_has_no_offset"),
    ),
)
