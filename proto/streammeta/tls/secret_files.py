"""Files with secrets: the allowed readers.

Only its owner may read a key or a token, with one exception: the group of the process may read a
file of root, because orchestrators provide secrets to other users in this way.
"""

from __future__ import annotations

import os
import stat

_GROUP_AND_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def is_open_to_others(status: os.stat_result) -> bool:
    """Return whether a file's mode allows other readers than the rule above."""
    denied = _GROUP_AND_OTHERS
    if status.st_uid == 0 and os.geteuid() != 0:
        denied &= ~stat.S_IRGRP
    return bool(status.st_mode & denied)
