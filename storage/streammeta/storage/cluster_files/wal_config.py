"""Values by which a node's registration says where its write-ahead log is, beside those of others.

An empty value is an older broker's: it may have a log on its disk.
"""

NO_LOG = "no-log/1"
"""The node has no write-ahead log: it acknowledges only what objects hold, and owes nothing."""

DISK_LOG = "disk-log/1 "
"""Prefix of the value of a node with a log on its disk; the id of that log follows, in hex.

Without one the process was about to make its log, and had acknowledged nothing.
"""
