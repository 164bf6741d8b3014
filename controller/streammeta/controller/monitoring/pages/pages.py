"""Status pages for people, rendered from the status document and reads of the metadata.

A page has cards, charts, tables and notes, and one template shows them all. Reads return the state
that is committed at this controller, so that pages are available without a leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast
from urllib.parse import urlencode

from streammeta.controller import errors
from streammeta.controller.metadata.api import answers, object_slices, requests
from streammeta.controller.metadata.tables.values import ObjectKind, PageRequest
from streammeta.controller.monitoring.http.http_listener import Page, ResponseCache, Route
from streammeta.controller.monitoring.pages.templating import (
    HTML,
    NOTHING,
    STATIC,
    Link,
    as_id,
    grouped,
    in_age,
    in_bytes,
    in_ms,
    new_environment,
    static_page,
    utc,
)
from streammeta.controller.monitoring.status.status import Fields, node_fields, stream_fields
from streammeta.controller.monitoring.status.status_api import StatusApi, json_page
from streammeta.controller.rpc.services.routes import LeaderView
from streammeta.controller.runtime.writer.controller import MetadataController

ROWS = 100
"""Maximum rows of a list on one page."""

READ_TIMEOUT_MS = 2_000
"""Time limit of a read of the metadata, in milliseconds."""

OF_THE_LEADER = (
    "Commits and their times cover the terms in which this controller led. For other terms see the"
    " pages of the controllers that led then."
)
"""Note of the page about commits."""

_Table: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[Any]]]
_Columns: TypeAlias = Mapping[str, str | tuple[str, Callable[[Any], Any]]]
"""Heads of columns, each with its field and the function that formats it, if there is one."""

_Chart: TypeAlias = tuple[str, str, str]

_NODE_COLUMNS: _Columns = {
    "broker": ("node_id", as_id),
    "session": "session",
    "last heartbeat": ("last_heartbeat_ms", in_age),
    "set objects": "set_objects",
    "open streams": "has_open_streams",
    "uploads owed": "uploads_owed",
    "locked": "locked",
    "recovered by": ("recovered_by", as_id),
    "epoch": "epoch",
    "tags": "tags",
}
_VOTER_COLUMNS: _Columns = {
    "controller": ("node_id", as_id),
    "lag, entries": "lag",
    "last fetch, ms ago": "last_fetch_age_ms",
    "caught up, ms ago": "last_caught_up_age_ms",
    "address": "endpoint",
}
_CONTROLLER_COLUMNS: _Columns = {
    "controller": ("node_id", as_id),
    "role": "role",
    "leader": ("leader_id", as_id),
    "epoch": "epoch",
    "end of log": "end_offset",
    "committed below": "high_watermark",
    "disk full": "disk_full",
    "repairing": "repairing",
}
_HOUR_COLUMNS: _Columns = {
    "from": ("begin_s", utc),
    "acknowledged": "accepted",
    "refused": "refused",
    "median time": ("p50_ms", in_ms),
    "p99 at most": ("p99_ms", in_ms),
    "led here": ("led", lambda share: f"{100 * (share or 0):.0f} %"),
}
_KEY_COLUMNS: _Columns = {"key": "key", "reason": "reason"}
_VOTERS = "Voters, as the leader sees them"
_STREAM_HEADS = ("stream", "state", "owner", "epoch", "start", "end", "tags")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Content of a page."""

    cards_: Sequence[tuple[str, Any, str]] = ()
    charts_: Sequence[_Chart] = ()
    tables: Sequence[_Table] = ()
    notes: Sequence[str] = ()
    next_: str = ""
    form: bool = False


_Make: TypeAlias = Callable[[Fields, int], Awaitable[Content]]


class StatusPages:
    """Renderer of one controller's pages."""

    def __init__(self, api: StatusApi, controller: MetadataController, view: LeaderView) -> None:
        self._api = api
        self._controller = controller
        self._view = view

        self._template = new_environment().get_template("page.html")
        self._kept: ResponseCache[Page] = ResponseCache()
        self._pages: Mapping[str, tuple[str, _Make]] = {
            "/": ("Overview", _overview),
            "/quorum": ("Quorum", _quorum),
            "/nodes": ("Brokers", self._nodes),
            "/streams": ("Streams", self._streams),
            "/deletions": ("Deletions", _deletions),
            "/compaction": ("Compaction", _compaction),
            "/reconcile": ("Reconciliation", _reconcile),
            "/build": ("Build", _build),
        }

    def routes(self) -> Mapping[str, Route]:
        """Return the pages and their static files, by path."""
        pages = {path: Route("status", partial(self._page, path)) for path in self._pages}
        pages["/stream"] = Route("status", partial(self._page, "/stream"))
        pages["/api/streams.json"] = Route("status", self._streams_json)
        files = {f"/static/{name}": Route("status", partial(_static, name)) for name in STATIC}
        return {**pages, **files}

    async def _page(self, path: str, query: Mapping[str, str]) -> Page:
        """Answer a request. `after` and `id` of its query are numbers."""
        number = _number_in(query, "id" if path == "/stream" else "after")
        tag = query.get("tag", "") if path == "/streams" else ""
        if number is None:
            return Page(b"id and after must be numbers, 0 or more\n", 400)
        if tag and "=" not in tag:
            return Page(b"tag must be KEY=VALUE\n", 400)
        return await self._kept.get((path, number, tag), lambda: self._made(path, number, tag))

    async def _made(self, path: str, number: int, tag: str) -> Page:
        document = await self._api.document()
        if path == "/stream":
            title, make = f"Stream {number}", cast(_Make, self._stream)
        elif tag:
            title, make = f"Streams with {tag}", partial(self._tagged_streams, tag)
        else:
            title, make = self._pages[path]

        try:
            content = await make(document, number)
        except errors.ApiError as error:
            content = Content(notes=(f"The map can't be read now: {error}",))

        context = {
            "s": document,
            "title": title,
            "here": path,
            "pages": [(page, name) for page, (name, _) in self._pages.items()],
            **{name: getattr(content, name) for name in Content.__dataclass_fields__},
        }
        text = await asyncio.to_thread(self._template.render, context)
        return Page(text.encode(), content_type=HTML)

    async def _read(self, request: Any) -> Any:
        answered = await self._controller.read(request, at_least=0, timeout_ms=READ_TIMEOUT_MS)
        return answered.answer

    async def _nodes(self, document: Fields, after: int) -> Content:
        page = PageRequest(page_size=ROWS, page_token=str(after) if after else "")
        found = cast(answers.GetNodesAnswer, await self._read(requests.GetNodes(page=page)))
        brokers = document["brokers"]
        sessions = [(name, count, "") for name, count in sorted(brokers["sessions"].items())]
        leads = document["quorum"]["role"] == "leader"
        nodes = [node_fields(node, self._view) for node in found.nodes]
        largest: _Columns = {
            "broker": ("node_id", as_id),
            "bytes": "bytes",
            "set objects": "objects",
        }

        return Content(
            cards_=(
                ("Brokers", grouped(brokers["count"]), ""),
                *sessions,
                ("In recovery", brokers["recovering"], ""),
                ("Owe uploads", brokers["owing"], ""),
                ("Locked", brokers["locked"], ""),
            ),
            tables=(
                _table("Most set objects", brokers["top"], _NODE_COLUMNS),
                _table("Most bytes in set objects", document["largest_brokers"], largest),
                _table("Brokers by id", nodes, _NODE_COLUMNS),
            ),
            notes=() if leads else ("Sessions are known to the leader alone: see its page.",),
            next_=f"/nodes?after={found.next_page_token}" if found.next_page_token else "",
        )

    async def _streams(self, document: Fields, after: int) -> Content:
        page = PageRequest(page_size=ROWS, page_token=str(after) if after else "")
        listed = await self._read(requests.DescribeStreams(page=page))
        top = {
            top_stream["stream_id"]: top_stream["ranges"] for top_stream in document["top_streams"]
        }
        sizes = {
            largest_stream["stream_id"]: largest_stream["bytes"]
            for largest_stream in document["largest_streams"]
        }
        named = tuple({**top, **sizes})
        described = await self._read(requests.DescribeStreams(stream_ids=named))
        by_id = {stream.stream_id: stream for stream in described.streams} if named else {}

        def rows(most: Mapping[int, int]) -> Sequence[Sequence[Any]]:
            return [
                (*_stream_row(by_id[stream_id]), most[stream_id])
                for stream_id in most
                if stream_id in by_id
            ]

        return Content(
            form=True,
            cards_=(("Streams", grouped(document["map"]["streams"]), ""),),
            tables=(
                ("Most ranges in objects", (*_STREAM_HEADS, "ranges"), rows(top)),
                ("Most bytes in stream objects", (*_STREAM_HEADS, "bytes"), rows(sizes)),
                (
                    "Streams by id",
                    _STREAM_HEADS,
                    [_stream_row(stream) for stream in listed.streams],
                ),
            ),
            next_=f"/streams?after={listed.next_page_token}" if listed.next_page_token else "",
        )

    async def _tagged_streams(self, tag: str, _: Fields, after: int) -> Content:
        found = await self._find_streams(tag, after)
        following = urlencode({"tag": tag, "after": found.next_page_token})
        return Content(
            form=True,
            tables=(
                (
                    f"Streams with {tag}",
                    _STREAM_HEADS,
                    [_stream_row(stream) for stream in found.streams],
                ),
            ),
            next_=f"/streams?{following}" if found.next_page_token else "",
        )

    async def _streams_json(self, query: Mapping[str, str]) -> Page:
        """Answer a request for the streams with a tag, the first `ROWS` from `after` on."""
        after, tag = _number_in(query, "after"), query.get("tag", "")
        if after is None or "=" not in tag:
            return json_page({"error": "after must be a number, and tag KEY=VALUE"}, 400)
        return await self._kept.get(("json", after, tag), lambda: self._make_json(tag, after))

    async def _make_json(self, tag: str, after: int) -> Page:
        try:
            found = await self._find_streams(tag, after)
        except errors.ApiError as error:
            is_invalid = isinstance(error, errors.InvalidRequestError | errors.LimitExceededError)
            return json_page({"error": str(error)}, 400 if is_invalid else 503)
        token = found.next_page_token
        return json_page(
            {
                "streams": [stream_fields(stream) for stream in found.streams],
                "next_after": int(token) if token else None,
            }
        )

    async def _find_streams(self, tag: str, after: int) -> answers.FindStreamsAnswer:
        key, _, value = tag.partition("=")
        page = PageRequest(page_size=ROWS, page_token=str(after) if after else "")
        request = requests.FindStreams(tags=((key, value),), page=page)
        return cast(answers.FindStreamsAnswer, await self._read(request))

    async def _stream(self, document: Fields, stream_id: int) -> Content:
        found = await self._read(
            requests.DescribeStreams(stream_ids=(stream_id,), include_ranges=True)
        )
        if not found.streams:
            return Content(form=True, notes=(f"There is no stream {stream_id}.",))

        (stream,) = found.streams
        query = object_slices.ObjectQuery(stream_id, stream.start_offset, -1, ROWS)
        read = await self._read(requests.GetObjects(queries=(query,)))
        result = read.results[0]
        held = result.objects if result.error is errors.ErrorCode.NONE else ()
        objects = [
            (
                str(range_.object_id),
                _kind(range_.kind),
                range_.start_offset,
                range_.end_offset,
                range_.object_size,
            )
            for range_ in held
        ]
        ranges = [
            (
                range_.range_index,
                range_.epoch,
                str(range_.node_id),
                range_.start_offset,
                range_.end_offset,
            )
            for range_ in stream.ranges
        ]
        return Content(
            form=True,
            tables=(
                ("Stream", _STREAM_HEADS, [_stream_row(stream)]),
                (
                    f"Objects to read from, the first {ROWS}",
                    ("object", "kind", "start", "end", "bytes"),
                    objects,
                ),
                ("Ranges of owners", ("range", "epoch", "broker", "start", "end"), ranges),
            ),
        )


def _number_in(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


async def _static(name: str, _: Mapping[str, str]) -> Page:
    return static_page(name)


async def _overview(s: Fields, _: int) -> Content:
    quorum, size, commits = s["quorum"], s["map"], s["commits"]
    backup, process = s["backup"], s["process"]
    leader = quorum["leader_id"] if quorum["has_leader"] else None
    silent = [controller["node_id"] for controller in s["controllers"] if not controller["answers"]]
    backup_card = (
        ()
        if backup is None
        else (("Backup behind", f"{backup['behind_s']:.0f} s", backup["problem"]),)
    )
    lease_s = s["bucket"]["lease_s"]
    lease_card = (
        () if lease_s is None else (("Bucket lease", f"{lease_s:.0f} s", s["bucket"]["problem"]),)
    )

    return Content(
        cards_=(
            ("Leader", "none" if leader is None else f"controller {leader}", _epoch(quorum)),
            (
                "Controllers",
                f"{len(s['controllers']) - len(silent)} of {len(s['controllers'])}",
                "answer" if not silent else f"silent: {', '.join(map(str, silent))}",
            ),
            ("Commits", f"{commits['accepted_per_s'] or 0:.1f}/s", "of the last minute, here"),
            ("Commit time", in_ms(commits["p50_ms"]), f"p99 {in_ms(commits['p99_ms'])}"),
            ("Streams", grouped(size["streams"]), ""),
            ("Objects", grouped(size["committed_objects"]), in_bytes(size["committed_bytes"])),
            ("Prepared", grouped(size["prepared_objects"]), "objects not committed yet"),
            ("Deletions owed", grouped(s["deletions"]["owed"]), f"{s['deletions']['stuck']} stuck"),
            ("Set objects", grouped(size["stream_set_objects"]), ""),
            ("Brokers", grouped(size["nodes"]), _sessions(s["brokers"]["sessions"])),
            ("Memory", in_bytes(process["memory_bytes"]), "of this controller"),
            *lease_card,
            *backup_card,
        ),
        charts_=(
            ("Commits", "per second", "commits_accepted,commits_refused"),
            ("Commit time", "ms", "commit_p50,commit_p99"),
            ("Objects", "", "objects_committed,objects_destroyed"),
            ("Event loop lag", "ms", "loop_lag"),
        ),
        tables=(
            _table(_VOTERS, quorum["voters"], _VOTER_COLUMNS),
            _table("Commits of the last hour, every 5 minutes", commits["hour"], _HOUR_COLUMNS),
        ),
        notes=(OF_THE_LEADER,),
    )


async def _quorum(s: Fields, _: int) -> Content:
    quorum = s["quorum"]
    controllers = [
        {**controller, "role": controller["role"] or f"silent: {controller['reason']}"}
        for controller in s["controllers"]
    ]

    return Content(
        cards_=(
            ("Role here", quorum["role"], ""),
            ("Leader", quorum["leader_id"] if quorum["has_leader"] else "none", _epoch(quorum)),
            ("Committed below", grouped(quorum["high_watermark"]), "offset of the log"),
        ),
        charts_=(
            ("Lag of the slowest voter", "entries, at the leader", "voter_lag"),
            ("Entries committed", "per second", "entries_committed"),
        ),
        tables=(
            _table(_VOTERS, quorum["voters"], _VOTER_COLUMNS),
            _table("Controllers, in their own words", controllers, _CONTROLLER_COLUMNS),
            _table("Observers", quorum["observers"], _VOTER_COLUMNS),
        ),
    )


async def _deletions(s: Fields, _: int) -> Content:
    owed = s["deletions"]
    return Content(
        cards_=(
            ("Owed", grouped(owed["owed"]), "objects marked destroyed"),
            ("In flight", grouped(owed["in_flight"]), ""),
            ("Refused", grouped(owed["refused"]), "tried again"),
            ("Stuck", grouped(owed["stuck"]), ""),
            ("Ahead", grouped(owed["ahead"]), "of the map"),
            ("Wait for the backup", grouped(owed["unbacked"]), f"{owed['unbacked_s']:.0f} s"),
            ("Rate", f"{owed['rate_per_s']:.0f}/s", "at most"),
        ),
        charts_=(
            ("Objects marked destroyed", "", "objects_destroyed"),
            ("In flight, stuck", "", "deletions_in_flight,deletions_stuck"),
        ),
        tables=(
            _table("Stuck keys, some", owed["stuck_keys"], _KEY_COLUMNS),
            _table("Keys ahead of the map, some", owed["ahead_keys"], _KEY_COLUMNS),
        ),
        notes=("Only the leader deletes objects. Others know only the pending deletions.",),
    )


async def _compaction(s: Fields, _: int) -> Content:
    compaction = s["compaction"]
    top = [broker for broker in s["brokers"]["top"] if broker["set_objects"]]
    return Content(
        cards_=(
            ("Set objects", grouped(compaction["set_objects"]), ""),
            ("Of brokers gone", grouped(compaction["departed_set_objects"]), ""),
            ("Brokers gone", grouped(compaction["departed_nodes"]), "that left set objects"),
        ),
        charts_=(
            ("Set objects", "", "set_objects"),
            ("Bytes of committed objects", "", "object_bytes"),
        ),
        tables=(
            _table(
                "Brokers gone, and who compacts their objects",
                compaction["assigned"],
                {"broker": ("node_id", as_id), "compacted by": ("compacted_by", as_id)},
            ),
            _table("Most set objects", top, _NODE_COLUMNS),
        ),
    )


async def _reconcile(s: Fields, _: int) -> Content:
    told = s["reconcile"]
    names = ("kind", "engine", "keys", "orphans", "orphan_bytes", "deleted", "missing", "result")
    rows = [
        (
            utc(run["ended_ms"] / 1000),
            f"{(run['ended_ms'] - run['started_ms']) / 1000:.1f} s",
            *(run[name] for name in names),
            run["problem"],
        )
        for run in told["runs"]
    ]
    heads = (
        *("ended", "took", "kind", "engine", "keys", "orphans", "bytes of orphans", "deleted"),
        *("missing", "result", "problem"),
    )
    success, missing, size = told["last_success_ms"], told["missing"], told["orphan_bytes"]
    notes = ["Runs are reported only if their caller may write keys with the role admin."]
    if told["problem"]:
        notes.insert(0, f"The reports of runs can't be read: {told['problem']}.")

    return Content(
        cards_=(
            ("Last success", utc(success / 1000) if success else NOTHING, ""),
            ("Missing objects", NOTHING if missing is None else grouped(missing), "or damaged"),
            ("Orphans", NOTHING if size is None else in_bytes(size), "when last looked for"),
        ),
        tables=(("Last runs", heads, rows),),
        notes=notes,
    )


async def _build(s: Fields, _: int) -> Content:
    build, process = s["build"], s["process"]
    return Content(
        cards_=(
            ("Version", build["version"], ""),
            ("Feature level", s["feature_level"], f"can run at {build['feature_levels']}"),
            ("Python", build["python"], build["implementation"]),
            ("Memory", in_bytes(process["memory_bytes"]), _limit(process)),
        ),
        charts_=(("CPU", "%", "cpu"), ("Memory", "bytes", "memory,request_memory")),
        tables=(
            _table(
                "Controllers",
                s["controllers"],
                {"controller": ("node_id", as_id), "version": "version"},
            ),
            ("Connections", ("plane", "open"), list(process["connections"].items())),
            _table(
                "Certificates",
                s["certificates"],
                {"plane": "plane", "until": ("not_after_s", utc)},
            ),
            ("Cluster", ("id", "uuid"), [(s["cluster_id"], s["cluster_uuid"])]),
        ),
        notes=("A version is shown for controllers that are connected to this one.",),
    )


def _table(caption: str, rows: Iterable[Fields], columns: _Columns) -> _Table:
    """Return a table with one row for each of `rows`, which are parts of the status document."""

    def cell(row: Fields, column: str | tuple[str, Callable[[Any], Any]]) -> Any:
        if isinstance(column, str):
            return row[column]
        name, formatted = column
        return formatted(row[name])

    cells = [[cell(row, column) for column in columns.values()] for row in rows]
    return caption, tuple(columns), cells


def _stream_row(stream: answers.StreamDescription) -> Sequence[Any]:
    return (
        Link(str(stream.stream_id), f"/stream?id={stream.stream_id}"),
        stream.state.name.lower(),
        None if stream.node_id < 0 else str(stream.node_id),
        None if stream.epoch < 0 else stream.epoch,
        stream.start_offset,
        stream.end_offset,
        dict(stream.tags),
    )


def _kind(kind: int) -> str:
    return ObjectKind(kind).name.lower().replace("_", " ")


def _epoch(quorum: Fields) -> str:
    return f"epoch {quorum['epoch']}"


def _limit(process: Fields) -> str:
    return f"limit {in_bytes(process['memory_limit_bytes'])}"


def _sessions(states: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(states.items()))
