"""The quorum: a KRaft-style Raft core that does no I/O. Entries are opaque bytes."""
