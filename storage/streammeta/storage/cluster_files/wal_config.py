"""Values of a node's registration that name the location of its write-ahead log.

An empty value comes from an older broker, which may have a log on its disk.
"""

NO_LOG = "no-log/1"
"""The node has no write-ahead log. It acknowledges only records in committed objects."""

DISK_LOG = "disk-log/1 "
"""Prefix of the value of a node with a log on its disk, followed by the log's id in hex.

Without an id the process had not created its log yet and had acknowledged nothing.
"""
