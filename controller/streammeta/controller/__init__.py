"""The metadata controller: a Raft-replicated map of streams, objects and nodes.

Packages in the order a request flows through them: `rpc` translates, `runtime` orders and waits,
`metadata` decides and replays, `records` gives decisions their bytes, `quorum` replicates them,
`journal` keeps them on disk, `snapshot` holds the whole map in one file, `lifecycle` expires and
deletes objects, `server` puts the parts together, `cli` and `shell` face the operator.

Words used throughout. *Epoch*: of the quorum, a leader's term; of a node, one process of a broker;
of a stream, one period of ownership. *High watermark*: the exclusive end of what a majority holds
durably. *Stream set object (SSO)*: one uploaded object with ranges of many streams of one node.
*Stream object (SO)*: one object with a range of one stream. *Prepared*: an object id issued to a
writer, not yet committed. *Mark destroyed*: out of the map, bytes still to be deleted.
"""
