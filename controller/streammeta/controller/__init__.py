"""The metadata controller: Raft-replicated metadata of streams, objects and nodes.

Packages in the order a request passes them: `rpc` translates, `runtime` orders and waits,
`metadata` decides and replays, `records` encodes decisions, `quorum` replicates them, `journal`
stores them on disk, `snapshot` stores the whole state in one file, `lifecycle` expires and deletes
objects, `process` assembles the parts.

Terms. *Epoch*: a leader's term in the quorum, one process of a broker for a node, and one period of
ownership for a stream. *High watermark*: the exclusive end of the log that a majority has stored
durably. *Stream set object (SSO)*: one uploaded object with ranges of many streams of one node.
*Stream object (SO)*: one object with a range of one stream. *Prepared*: an object id issued to a
writer, not yet committed. *Mark destroyed*: removed from the metadata, bytes still to be deleted.
"""
