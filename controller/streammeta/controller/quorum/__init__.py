"""KRaft-style Raft core of the quorum: it does no I/O, and its entries are opaque bytes."""
