"""Features of the public brokers that this product does not have, by the words that name them.

A scenario that is not understood, and has such words, is about something that cannot run here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

FEATURES = {
    "transactions": r"transact\w*|aborted|abort (?:of|marker)|unstable|committed only",
    "truncation": r"truncat\w+",
    "hand-over": r"hand-?off|hand-?over|freez\w+|frozen|reassign\w*",
    "failover control": r"fail-?over (?:control\w*|context|node)|failed (?:node|broker)s?|failover",
    "segments as files": r"slices?|(?:directory|dir|file) names?|dir|rename\w*|topic-partition",
    "verification of producers": r"verification|prepare\w*|group metadata|consumer_offsets",
    "cache of entry offsets with an age": r"offsets? cache|ttl\w*|put ledger|clear",
    "configuration of a driver": r"provider|region|endpoint|credentials?|bucket|filesystem",
    "sizes for readers": r"human\w*|readable",
    "index files of an older format": r"old(?:er)? format|convert\w*",
    "background services": r"dispatch service|thread\w*|executor\w*|metrics?|scheduler",
    "a closed managed ledger": r"close the managed ledger|managed ledger is closed",
    "remote log metadata": r"remote_?log\w*|copy_segment\w*|delete_segment\w*|leader_epoch_chain",
    "a running write-ahead log": r"upload threshold|batch interval|accumulator|segment limit",
}
"""Features by name, with the pattern of their words."""


def feature_of(scenario: Mapping[str, Any]) -> str | None:
    """Return the feature that a scenario's own words name; None for none.

    The name, the source and the notes are remarks, so they do not count.
    """
    sections = ("input", "given", "steps", "expect", "derived")
    words = " ".join(word for part in sections for word in _words(scenario.get(part)))
    said = words.replace("_", " ").lower()
    for feature, pattern in FEATURES.items():
        if re.search(rf"\b(?:{pattern.replace('_', ' ')})\b", said):
            return feature
    return None


def _words(value: Any) -> Iterator[str]:
    """Yield keys and texts of a tree."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from _words(part)
    elif isinstance(value, list):
        for part in value:
            yield from _words(part)
    elif isinstance(value, str):
        yield value
