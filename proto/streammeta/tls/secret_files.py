"""Files with secrets: by whom they may be read.

A key or a token is its owner's alone, with one exception: a file of root's may be read by the group
that a process runs in, as orchestrators place secrets for processes that are not root.
"""

from __future__ import annotations

import os
import stat

_GROUP_AND_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def is_open_to_others(status: os.stat_result) -> bool:
    """Return whether a file's mode lets others at it than the rule above names."""
    denied = _GROUP_AND_OTHERS
    if status.st_uid == 0 and os.geteuid() != 0:
        denied &= ~stat.S_IRGRP
    return bool(status.st_mode & denied)
