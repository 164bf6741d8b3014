"""Offloaded ledgers of Pulsar: objects byte for byte, and the list of offloaded ledgers.

Formats (`blocks`, `index_block`, `ledger_values`, `object_names`) do no I/O. `offloader` writes,
reads and deletes the two objects of a ledger. `ledger_list` decides on a managed ledger's ledgers.
"""
