"""Random well-formed requests and reads that a model's state holds or held.

Most are what a correct broker would send next; the rest is off by one in an epoch, an owner, an
object or an offset.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from streammeta.controller.features import SUPPORTED
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables import values as v
from tests.metadata.random_commits import NODE_IDS, RandomCommits, range_columns
from tests.metadata.slow_model import Model
from tests.metadata.slow_model_adoption import epoch_owed
from tests.metadata.slow_model_state import State
from tests.metadata.slow_model_uploads import Row

STREAMS_MAX = 5


class RandomRequests(RandomCommits):
    """Makes requests for one model, which it only reads."""

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        # Each sequence has its favourites: what is common in none of them is common in some.
        factors = rng.choices((0.2, 1, 1, 1, 4), k=len(_WEIGHTS))
        self._weights = [
            weight * factor for weight, factor in zip(_WEIGHTS.values(), factors, strict=True)
        ]

    def start(self, model: Model) -> Iterator[Any]:
        """Yield the writes that a cluster begins with, each to be made before the next."""
        for node_id in NODE_IDS:
            yield r.RegisterNode(node=v.NodeIdentity(node_id, 1))
        for node_id in NODE_IDS[:2]:
            node = v.NodeIdentity(node_id, 1)
            new = (r.NewStream(), r.NewStream())
            yield r.CreateStreams(request_id=f"s{node_id}", node=node, streams=new)
            first = model.state.next_stream - 2
            items = tuple(r.StreamToOpen(stream, 1) for stream in (first, first + 1))
            yield r.OpenStreams(node=node, streams=items)
            yield r.PrepareObjects(request_id=f"p{node_id}", node=node, count=8, ttl_ms=60_000)
        yield r.SetFeatureLevel(level=self._one((3, 4, *(SUPPORTED.highest,) * 4)))
        if model.state.feature_level >= 5:
            new = (r.NewStream(shared=True), r.NewStream(shared=True))
            yield r.CreateStreams(request_id="shared", node=node, streams=new)

    def any(self, model: Model) -> Any:
        """Return some write; ids to commit are prepared when they run out."""
        if model.state.undecided is not None and self._chance(60):
            return self.make("finish_restore" if self._chance(6) else "adopt", model)
        if sum(map(model.state.is_prepared, model.state.objects)) < 4 and self._chance(80):
            return self.make("prepare", model)
        (kind,) = self._rng.choices(list(_WEIGHTS), self._weights)
        return self.make(kind, model)

    def make(self, kind: str, model: Model) -> Any:
        """Return a write of one kind; see `_WEIGHTS`."""
        request = getattr(self, f"_{kind}")(model.state)
        if kind in _RECOVERIES and self._chance(30):
            request = self._by_recoverer(model.state, request)
        return self._with_effects(model.state, request) if kind in _COMMITS else request

    def _by_recoverer(self, state: State, request: Any) -> Any:
        """Let a request of a recovery say who makes it, mostly the node it is assigned to."""
        node = state.nodes.get(request.node.node_id)
        assigned = node.recovered_by if node is not None else -1
        if assigned < 0 or self._chance(20):
            assigned = self._one([i for i in NODE_IDS if i != request.node.node_id])
        if assigned == request.node.node_id or not getattr(request, "failover", True):
            return request
        return replace(request, recoverer=self._identity(state, assigned))

    def _with_effects(self, state: State, request: Any) -> Any:
        """Let values be put and streams be trimmed with some of the commits that can be known."""
        is_merge = isinstance(request, r.CommitStreamObject)
        sources = request.source_object_ids if is_merge else request.compacted_object_ids
        has_result = request.object_id >= 0 and sources.tolist() != [request.object_id]
        if not has_result or state.feature_level < 3 or self._chance(85):
            return request
        puts = self._puts(state) if self._chance(70) else ()
        trims = self._trims(state, request.node.node_id) if self._chance(60) else ()
        return replace(request, kv_puts=puts, trims=trims)

    def _trims(self, state: State, node_id: int) -> tuple[r.StreamToTrim, ...]:
        own = [i for i, stream in state.streams.items() if stream.node == node_id and stream.opened]
        chosen = self._some(own, 2) if own and not self._chance(5) else [self._stream(state)]
        return tuple(
            r.StreamToTrim(
                stream_id,
                self._epoch(state, stream_id),
                self._trimmed_to(state, stream_id) if stream_id in state.streams else 0,
                self._appended_end(state, stream_id),
            )
            for stream_id in chosen
        )

    # ---- streams ----

    def _create(self, state: State) -> Any:
        if len(state.streams) >= STREAMS_MAX:
            return self._open(state)
        return self._new_streams(state)

    def _new_streams(self, state: State) -> Any:
        may_share = state.feature_level >= 5
        new = tuple(
            r.NewStream(self._tags(), shared=may_share and self._chance(50))
            for _ in range(self._rng.randint(1, 2))
        )
        return r.CreateStreams(request_id=self._request_id(), node=self._node(state), streams=new)

    def _streams(self, state: State, *, opened: bool) -> list[int]:
        """Return some streams of one owner."""
        fitting = [i for i, stream in state.streams.items() if stream.opened is opened]
        if not fitting or self._chance(10):
            return [self._stream(state)]
        first = self._one(fitting)
        owner = state.streams[first].node
        return self._some([i for i in fitting if state.streams[i].node == owner], 3)

    def _open(self, state: State) -> Any:
        if all(stream.opened for stream in state.streams.values()) and self._chance(80):
            return self._close(state)
        streams = self._streams(state, opened=False)
        node = self._node(state) if self._chance(60) else self._owner(state, streams[0])
        items = []
        for stream_id in streams:
            stream = state.streams.get(stream_id)
            epoch = (stream.epoch if stream is not None else 0) + self._one((1, 1, 1, 0, 2))
            items.append(
                r.StreamToOpen(stream_id, max(0, epoch), self._tags(), reopen=self._chance(40))
            )
        return r.OpenStreams(node=node, streams=tuple(items))

    def _close(self, state: State) -> Any:
        streams = self._streams(state, opened=not self._chance(10))
        items = []
        for stream_id in streams:
            stream = state.streams.get(stream_id)
            end = None
            if stream is not None and self._chance(60):
                end = max(0, stream.end + self._one((0, 5, 5, 9, 9, 12, -1)))
            items.append(r.StreamToClose(stream_id, self._epoch(state, stream_id), end))
        return r.CloseStreams(node=self._owner(state, streams[0]), streams=tuple(items))

    def _trim(self, state: State) -> Any:
        streams = self._streams(state, opened=True)
        items = []
        for stream_id in streams:
            stream = state.streams.get(stream_id)
            start = self._trimmed_to(state, stream_id) if stream is not None else 0
            appended = self._appended_end(state, stream_id)
            items.append(r.StreamToTrim(stream_id, self._epoch(state, stream_id), start, appended))
        return r.TrimStreams(node=self._owner(state, streams[0]), streams=tuple(items))

    def _trimmed_to(self, state: State, stream_id: int) -> int:
        stream = state.streams[stream_id]
        low, high = stream.start, stream.end
        offsets = [low, (low + high) // 2, (low + 3 * high) // 4, high, high + 3]
        if self._chance(60):
            # Where one object's data ends and another's begins.
            held = (row for item in state.objects.values() for row in item.held)
            ends = {end for stream, _, end in held if stream == stream_id and low < end < high}
            offsets = sorted(ends) or offsets
        if self._chance(4):
            return self._one((high + 2**40, high + 2**40 + 1, 2**63 - 1))
        return max(0, self._one(offsets) + self._one((0, 0, 1, -1)))

    def _appended_end(self, state: State, stream_id: int) -> int | None:
        """Return how far the owner says that it has appended, which may be wrong."""
        stream = state.streams.get(stream_id)
        end = stream.end if stream is not None else 0
        return self._one((None, 0, end, end + 2, end + 2, 2**63 - 1 if self._chance(20) else end))

    def _delete(self, state: State) -> Any:
        streams = self._streams(state, opened=False)[:2]
        items = tuple(r.StreamToDelete(i, self._epoch(state, i, least=-1)) for i in streams)
        return r.DeleteStreams(node=self._node(state), streams=items)

    def _opening(self, state: State) -> Any:
        identity = self._node(state)
        page = v.PageRequest()
        if self._chance(30):
            page = v.PageRequest(1, "" if self._chance(50) else str(self._rng.randrange(4)))
        return r.GetOpeningStreams(node=identity, failover=self._chance(15), page=page)

    def _abandon(self, state: State) -> Any:
        owing = [node for node, _ in state.pending] or NODE_IDS
        streams = self._some(range(state.next_stream), 2) if self._chance(30) else ()
        if not streams and self._chance(60):
            return r.ReleaseStreams(node=self._node(state))
        return r.AbandonUploads(node_id=self._one(owing), stream_ids=tuple(streams))

    def _issue_producers(self, state: State) -> Any:
        if state.feature_level < 5 and self._chance(80):
            return self._prepare(state)
        return r.IssueProducerIds(node=self._node(state), count=self._one((1, 10_000)))

    def _expire_producers(self, _state: State) -> Any:
        return r.ExpireProducers(
            limit=self._one((1, 2, 1_000)),
            idle_ms=self._one((1, 100, 500)),
            since_ms=self._one((0, 0, 1_000)),
        )

    def _sweep(self, _state: State) -> Any:
        return r.SweepDeletedStreams(limit=self._rng.randint(1, 3))

    # ---- objects ----

    def _prepare(self, state: State) -> Any:
        return r.PrepareObjects(
            request_id=self._request_id(),
            node=self._node(state),
            count=8,
            ttl_ms=self._one((1_000, 60_000, 60_000)),
        )

    def _expire(self, _state: State) -> Any:
        return r.ExpireObjects(limit=self._one((1, 3, 1_000)))

    def _remove(self, state: State) -> Any:
        marked = [
            i for i, item in state.objects.items() if item.state is v.ObjectState.MARK_DESTROYED
        ]
        ids = self._some(marked, 5) if marked else [self._rng.randrange(state.next_object + 1)]
        if self._chance(10):
            ids.append(self._rng.randrange(state.next_object + 1))
        return r.RemoveObjects(object_ids=tuple(ids))

    def _hold(self, _state: State) -> Any:
        return r.HoldDeletions(hold_ms=self._one((1, 300, 900)))

    def _claim_bucket(self, state: State) -> Any:
        return r.ClaimBucket(
            cluster_uuid=self._one(("u", "v")),
            issued_below=state.next_object + self._one((-state.next_object, 0, 7, 500)),
        )

    def _adopt(self, state: State) -> Any:
        low, high = state.undecided or (0, state.next_object)
        free = [object_id for object_id in range(low, high) if object_id not in state.objects]
        source = free if free and not self._chance(8) else range(high + 2)
        ids = sorted(self._some(source, 3)) or [high]
        ends: dict[int, int] = {}
        replaced = self._some(sorted(state.objects), 2) if self._chance(40) else []
        rows = [self._rows_to_adopt(state, ends) for _ in ids]
        self._rng.shuffle(rows)
        if replaced:
            rows[0] = self._rows_in_place_of(state, replaced) or rows[0]
        facts = self._fact_columns(len(ids))
        return r.AdoptObjects(
            object_id=v.column(ids),
            object_size=v.column([self._rng.randrange(90) for _ in ids]),
            range_count=v.column([len(part) for part in rows]),
            ranges=range_columns([row for part in rows for row in part], epochs=True),
            replaced=v.column(sorted(replaced)),
            **facts,
        )

    def _rows_in_place_of(self, state: State, replaced: list[int]) -> list[Row]:
        """Return ranges with most of what objects hold, and sometimes what follows."""
        held = [part for object_id in replaced for part in state.objects[object_id].held]
        rows: dict[int, Row] = {}
        for stream_id, start, end in sorted(held):
            if self._chance(15) or stream_id not in state.streams:
                continue
            first, stream = rows.get(stream_id), state.streams[stream_id]
            low = (start if first is None else first.start) + self._one((0, 0, 0, 1))
            high = stream.end + self._rng.randint(0, 5) if self._chance(30) else end
            if low < high:
                rows[stream_id] = Row(stream_id, low, high, max(0, stream.epoch), -1)
        return [row for _, row in sorted(rows.items())]

    def _rows_to_adopt(self, state: State, ends: dict[int, int]) -> list[Row]:
        """Return ranges that continue their streams behind those before them, most of them."""
        ids = sorted({self._stream(state) for _ in range(self._one((1, 1, 2)))})
        rows = []
        for stream_id in ids:
            stream = state.streams.get(stream_id)
            start = ends.get(stream_id, 0 if stream is None else stream.end)
            debtors = [key[0] for key in state.pending if key[1] == stream_id]
            debtors = [node for node in debtors if state.owed(node, stream_id) is not None]
            end = start + self._rng.randint(1, 9)
            epoch = 0 if stream is None else stream.epoch
            if debtors and self._chance(60):
                debtor = self._one(debtors)
                start, end = state.owed(debtor, stream_id) or (start, end)
                epoch = epoch_owed(state, debtor, stream_id) - self._one((0, 0, 1))
            elif self._chance(8):
                start, end = start + 1, end + 1
            else:
                ends[stream_id] = end
            rows.append(Row(stream_id, start, end, max(0, epoch + self._one((0, 0, 0, 1))), -1))
        return rows

    def _finish_restore(self, _state: State) -> Any:
        return r.FinishRestore()

    def _feature_level(self, _state: State) -> Any:
        return r.SetFeatureLevel(level=self._one((1, SUPPORTED.highest)))

    def _destroy_dead(self, state: State) -> Any:
        after = self._one((-1, -1, state.next_object // 2))
        return r.DestroyDeadStreamSetObjects(
            node_id=self._one(NODE_IDS), after_object_id=after, limit=self._one((1, 2, 100))
        )

    # ---- nodes and keys ----

    def _register(self, state: State) -> Any:
        identity = self._node(state)
        epoch = identity.node_epoch + self._one((0, 0, 0, 1))
        tags = self._tags()
        return r.RegisterNode(
            node=v.NodeIdentity(identity.node_id, epoch),
            wal_config=f"w{epoch}",
            tags=tags,
            process_id=("", "a", "b")[len(tags) % 3],
        )

    def _unregister(self, state: State) -> Any:
        idle = [i for i in state.nodes if not state.open_streams_of(i) and not state.owed_by(i)]
        node_id = self._one(idle) if idle and self._chance(70) else self._one(NODE_IDS)
        return r.UnregisterNode(node=self._identity(state, node_id))

    def _supervise(self, state: State) -> Any:
        return r.SuperviseNode(node=self._node(state))

    def _lock(self, state: State) -> Any:
        # A lock is felt by who would open what the node had.
        left = [stream.node for stream in state.streams.values() if not stream.opened]
        node_id = self._one(left) if left and self._chance(70) else self._one(NODE_IDS)
        return r.SetNodeLock(node_id=max(0, node_id), locked=self._chance(70))

    def _next_node_id(self, _state: State) -> Any:
        return r.GetNextNodeId(request_id=self._request_id())

    def _assign(self, state: State) -> Any:
        targets = []
        for node_id in self._some(NODE_IDS, 2):
            identity = self._identity(state, node_id)
            target = self._one([i for i in NODE_IDS if i != node_id] + [-1])
            targets.append(r.RecoveryTarget(node_id, identity.node_epoch, target))
        return r.AssignRecoveries(targets=tuple(targets))

    def _version(self, state: State, namespace: str, key: str) -> int | None:
        _, version = state.kvs.get((namespace, key), (b"", 0))
        return self._one((None, None, version, version, version + 1))

    def _put(self, state: State) -> Any:
        return r.PutKVs(items=self._puts(state))

    def _puts(self, state: State) -> tuple[r.KVToPut, ...]:
        namespace = self._one("mn")
        return tuple(
            r.KVToPut(
                namespace=namespace,
                key=key,
                value=str(self._rng.randrange(9)).encode(),
                overwrite=self._chance(50),
                expected_version=self._version(state, namespace, key),
            )
            for key in self._some("abc", 2)
        )

    def _delete_keys(self, state: State) -> Any:
        known = sorted(key for key in state.kvs if key[0] in "mn")
        if not known or self._chance(20):
            known = [("m", "a"), ("n", "b")]
        keys = tuple(
            r.KVKey(
                namespace=namespace, key=key, expected_version=self._version(state, namespace, key)
            )
            for namespace, key in self._some(known, 2)
        )
        return r.DeleteKVs(keys=keys)

    # ---- named objects ----

    def _commit_named(self, state: State) -> Any:
        if state.feature_level < 3:
            return self._put(state)
        node = self._node(state)
        names = self._some(NAMES, 2)
        owners = [self._owner_of_named(state) for _ in names]
        return r.CommitNamedObjects(
            node=node,
            objects=tuple(
                r.NamedObjectToCommit(
                    object_id=object_id,
                    name=name,
                    object_size=self._one((0, 7)),
                    crc32c=self._one((-1, 0, 5)),
                    metadata=self._tags(),
                    **owner,
                )
                for name, owner, object_id in zip(
                    names, owners, self._prepared(state, len(names)), strict=True
                )
            ),
        )

    def _owner_of_named(self, state: State) -> dict[str, Any]:
        keys = [key for key in sorted(state.kvs) if key[0] in "mn"]
        if keys and self._chance(50):
            return {"owner_key": r.OwnerKey(*self._one(keys))}
        if self._chance(5):
            return {"owner_key": r.OwnerKey("n", "absent")}
        return {"owner_stream_id": self._stream(state)}

    def _delete_named(self, state: State) -> Any:
        known = [name for name in NAMES if ("_streammeta/named", name) in state.kvs] or NAMES
        items = tuple(
            r.NamedObjectToDelete(
                name=name,
                object_id=self._one((None, None, None, self._rng.randrange(state.next_object + 1))),
            )
            for name in self._some(known, 2)
        )
        owner = self._owner_of_named(state) if self._chance(50) else {}
        return r.DeleteNamedObjects(
            node=self._node(state),
            objects=() if owner and self._chance(60) else items,
            with_owner_key="owner_key" in owner and self._chance(70),
            **owner,
        )


NAMES = ("a", "b", "b/1", "b/2", "c")
"""Names of objects."""

_WEIGHTS = {
    "upload": 24,
    "append": 12,
    "issue_producers": 1,
    "expire_producers": 1,
    "batch": 9,
    "repeat": 6,
    "resend": 2,
    "repeat_upload": 2,
    "compact_set": 12,
    "compact_stream": 14,
    "open": 11,
    "close": 7,
    "trim": 4,
    "create": 3,
    "delete": 3,
    "opening": 4,
    "abandon": 3,
    "sweep": 2,
    "prepare": 5,
    "expire": 2,
    "remove": 3,
    "hold": 1,
    "claim_bucket": 1,
    "destroy_dead": 2,
    "register": 2,
    "unregister": 2,
    "supervise": 1,
    "lock": 4,
    "next_node_id": 1,
    "assign": 1,
    "put": 3,
    "delete_keys": 2,
    "commit_named": 3,
    "delete_named": 1,
}
_COMMITS = ("upload", "compact_set", "compact_stream")
"""Commits that values to put and streams to trim may come with."""

_RECOVERIES = ("upload", "close", "opening")
"""Requests that a recovery makes in the name of another node."""

MAKERS = (*_WEIGHTS, "new_streams", "feature_level", "adopt", "finish_restore")
"""Names that `RandomRequests.make` takes."""
