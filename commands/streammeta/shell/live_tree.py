"""Tree of a live cluster, resolved by RPC: every read sends a request, nothing is cached.

    /cluster                                    the leader, the committed log, sizes
    /kv/<namespace>/<key>                       `_default` is the namespace without a name
    /nodes/<id>/info                            a broker and its process
    /nodes/<id>/stream_set_objects/<object id>  in the node's order
    /objects/<id>                               every object in the registry
    /streams/<id>                               a stream, its ranges, the objects to read it from

Every directory fetches its children page by page. Requests go through a `Caller`, which finds the
leader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Protocol, TypeAlias, TypeVar

from streammeta.rpc.blocking_client import Request, Response, UnaryMethod
from streammeta.shell import documents, tree
from streammeta.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    kv_pb2,
    kv_pb2_grpc,
    nodes_pb2,
    nodes_pb2_grpc,
    objects_pb2,
    objects_pb2_grpc,
    streams_pb2,
    streams_pb2_grpc,
)

PAGE_SIZE = 1000
DEFAULT_NAMESPACE = "_default"
READ_AHEAD = 100  # files of a listing fetched together once one of them is read
READ_PATH_LIMIT = 1000  # objects shown of those that hold a stream's records
SUGGEST_DIGITS = 2  # how many digits completion looks ahead


class Caller(Protocol):
    """Sends a request to the leader and returns its answer."""

    def call(self, method: UnaryMethod[Request, Response], request: Request) -> Response:
        """Send the request. Raises `ApiError` without an answer."""
        ...


def live_tree(caller: Caller) -> tree.Directory:
    """Return the root of the tree of the cluster that `caller` reaches. Sends no request yet."""
    cluster = tree.File(lambda: documents.cluster(_describe_cluster(caller)))
    return tree_of(caller, cluster, lambda: _describe_cluster(caller).object_namespace)


def tree_of(
    caller: Caller, cluster: tree.File, read_namespace: Callable[[], str] = lambda: ""
) -> tree.Directory:
    """Return the root of the tree of `caller`'s metadata, with a file about the whole of it.

    Without the namespace of object keys, objects are shown without their keys.
    """
    objects = _ObjectDirectory(caller, read_namespace)
    return _FixedDirectory(
        {
            "cluster": cluster,
            "kv": _NamespaceDirectory(caller),
            "nodes": _NodesDirectory(caller, objects),
            "objects": objects,
            "streams": _StreamDirectory(caller),
        }
    )


def _describe_cluster(caller: Caller) -> admin_pb2.DescribeClusterResponse:
    return caller.call(
        lambda channel: admin_pb2_grpc.AdminServiceStub(channel).DescribeCluster,
        admin_pb2.DescribeClusterRequest(),
    )


@dataclass(frozen=True, slots=True)
class _FixedDirectory(tree.Directory):
    """Directory whose children are known."""

    nodes: dict[str, tree.Node]

    def children(self, prefix: str = "") -> Iterator[tree.Child]:
        for name, node in self.nodes.items():
            if name.startswith(prefix):
                yield tree.Child(name, node)


def parse_id(name: str) -> int | None:
    """Return the 63-bit id with the decimal form `name`, or None."""
    # int() accepts other digits and signs, and converts long texts slowly.
    if not (name.isascii() and name.isdigit() and len(name) <= 19 and str(int(name)) == name):
        return None
    return int(name) if int(name) < 2**63 else None


def ids_to_suggest(prefix: str) -> list[int]:
    """Return ids that begin with `prefix` and up to `SUGGEST_DIGITS` more digits, ascending."""
    first = parse_id(prefix)
    if first is None:
        return []
    # No other id begins with 0.
    if first == 0:
        return [0]
    ids = [
        first * 10**digits + offset
        for digits in range(SUGGEST_DIGITS + 1)
        for offset in range(10**digits)
    ]
    return [number for number in ids if number < 2**63]


Fetch: TypeAlias = Callable[[list[int]], dict[int, tree.Document]]


@dataclass(slots=True)
class _ReadAhead:
    """Files of one page of a listing. Reading one also fetches the following ones.

    So showing a directory costs one request for many files, and listing names costs none. A fetched
    document is returned once. Reading a file again sends a new request.
    """

    ids: list[int]
    fetch: Fetch
    _documents: dict[int, tree.Document] = field(default_factory=dict, init=False)

    def children(self, prefix: str) -> Iterator[tree.Child]:
        """Yield the page's entries whose names begin with `prefix`."""
        for index, number in enumerate(self.ids):
            if str(number).startswith(prefix):
                yield tree.Child(str(number), tree.File(partial(self._read, index)))

    def _read(self, index: int) -> tree.Document | None:
        if self.ids[index] not in self._documents:
            self._documents = self.fetch(self.ids[index : index + READ_AHEAD])
        return self._documents.pop(self.ids[index], None)


Item = TypeVar("Item")
Listing: TypeAlias = tuple[list[Item], str]
"""Page of a listing, and the token of the next one, empty on the last."""


def _pages(fetch: Callable[[common_pb2.PageRequest], Listing[Item]]) -> Iterator[list[Item]]:
    """Fetch all pages in order."""
    token = ""
    while True:
        page, token = fetch(common_pb2.PageRequest(page_size=PAGE_SIZE, page_token=token))
        yield page
        if not token:
            return


class _IdDirectory(tree.Directory):
    """Files named by ids, in id order. A subclass lists ids and fetches files."""

    __slots__ = ()

    def list_ids(
        self, page: common_pb2.PageRequest | None = None, among: Sequence[int] = ()
    ) -> Listing[int]:
        """List a page of all ids, or of existing ids in `among`."""
        raise NotImplementedError

    def fetch(self, ids: list[int]) -> dict[int, tree.Document]:
        """Return the documents of existing ids among `ids`."""
        raise NotImplementedError

    def children(self, prefix: str = "") -> Iterator[tree.Child]:
        for ids in _pages(self.list_ids):
            yield from _ReadAhead(ids, self.fetch).children(prefix)

    def child(self, name: str) -> tree.Node | None:
        number = parse_id(name)
        # Fetched to see that it exists. The file keeps it, so reading costs no second request.
        document = None if number is None else self.fetch([number]).get(number)
        return None if document is None else tree.File(lambda: document)

    def suggest(self, prefix: str, limit: int) -> list[tree.Child]:
        """Look up ids that may begin with the prefix, because listing could read millions."""
        # Without a prefix, the first page already has enough.
        if not prefix:
            return list(islice(self.children(), limit))
        ids = ids_to_suggest(prefix)
        found = self.list_ids(among=ids)[0][:limit] if ids else []
        return list(_ReadAhead(found, self.fetch).children(prefix))


@dataclass(frozen=True, slots=True)
class _StreamDirectory(_IdDirectory, tree.TaggedDirectory):
    """All streams, in id order."""

    caller: Caller

    def find_tagged(self, tags: Mapping[str, str]) -> Iterator[tree.Child]:
        wanted = [common_pb2.Tag(key=key, value=value) for key, value in tags.items()]

        def list_ids(page: common_pb2.PageRequest) -> Listing[int]:
            found = self.caller.call(
                lambda channel: streams_pb2_grpc.StreamServiceStub(channel).FindStreams,
                streams_pb2.FindStreamsRequest(tags=wanted, page=page),
            )
            return [stream.stream_id for stream in found.streams], found.next_page_token

        for ids in _pages(list_ids):
            yield from _ReadAhead(ids, self.fetch).children("")

    def list_ids(
        self, page: common_pb2.PageRequest | None = None, among: Sequence[int] = ()
    ) -> Listing[int]:
        found = self._describe(streams_pb2.DescribeStreamsRequest(page=page, stream_ids=among))
        return [stream.stream_id for stream in found.streams], found.next_page_token

    def fetch(self, stream_ids: list[int]) -> dict[int, tree.Document]:
        request = streams_pb2.DescribeStreamsRequest(
            stream_ids=stream_ids, include_ranges=True, include_stream_objects=True
        )
        streams = [stream for page in self._descriptions(request) for stream in page.streams]
        return {
            stream.stream_id: documents.stream(stream, readable)
            for stream, readable in zip(streams, self._readable(streams), strict=True)
        }

    def _readable(
        self, streams: list[streams_pb2.StreamDescription]
    ) -> Sequence[objects_pb2.ObjectList]:
        """Return the objects that contain the records of each stream, of every kind."""
        if not streams:
            return []
        queries = [
            objects_pb2.ObjectQuery(
                stream_id=stream.stream_id,
                start_offset=stream.start_offset,
                limit=READ_PATH_LIMIT,
            )
            for stream in streams
        ]
        found: list[objects_pb2.ObjectList] = []

        # The controller may answer only some queries, to bound its response. Ask again for the
        # rest.
        while len(found) < len(queries):
            answer = self.caller.call(
                lambda channel: objects_pb2_grpc.ObjectServiceStub(channel).GetObjects,
                objects_pb2.GetObjectsRequest(queries=queries[len(found) :], may_stop=True),
            )
            found.extend(answer.results)

        return found

    def _descriptions(
        self, request: streams_pb2.DescribeStreamsRequest
    ) -> Iterator[streams_pb2.DescribeStreamsResponse]:
        while True:
            page = self._describe(request)
            yield page
            if not page.next_page_token:
                return
            request.page.page_token = page.next_page_token

    def _describe(
        self, request: streams_pb2.DescribeStreamsRequest
    ) -> streams_pb2.DescribeStreamsResponse:
        return self.caller.call(
            lambda channel: streams_pb2_grpc.StreamServiceStub(channel).DescribeStreams, request
        )


@dataclass(slots=True)
class _ObjectDirectory(_IdDirectory):
    """All objects in the registry, in id order."""

    caller: Caller
    read_namespace: Callable[[], str]
    _object_namespace: str = field(default="", init=False)

    def list_ids(
        self, page: common_pb2.PageRequest | None = None, among: Sequence[int] = ()
    ) -> Listing[int]:
        found = self._describe(objects_pb2.DescribeObjectsRequest(page=page, object_ids=among))
        return [described.object_id for described in found.objects], found.next_page_token

    def fetch(self, object_ids: list[int]) -> dict[int, tree.Document]:
        found = list(chain.from_iterable(_pages(partial(self._page_of, object_ids))))
        if found and not self._object_namespace:  # fixed when the cluster is created
            self._object_namespace = self.read_namespace()
        return {
            described.object_id: documents.stored_object(described, self._object_namespace)
            for described in found
        }

    def _page_of(
        self, object_ids: list[int], page: common_pb2.PageRequest
    ) -> Listing[objects_pb2.ObjectDescription]:
        request = objects_pb2.DescribeObjectsRequest(object_ids=object_ids, page=page)
        found = self._describe(request)
        return list(found.objects), found.next_page_token

    def _describe(
        self, request: objects_pb2.DescribeObjectsRequest
    ) -> objects_pb2.DescribeObjectsResponse:
        return self.caller.call(
            lambda channel: objects_pb2_grpc.ObjectServiceStub(channel).DescribeObjects, request
        )


def _get_nodes(
    caller: Caller, node_ids: Sequence[int], page: common_pb2.PageRequest
) -> Listing[nodes_pb2.NodeDescription]:
    response = caller.call(
        lambda channel: nodes_pb2_grpc.NodeServiceStub(channel).GetNodes,
        nodes_pb2.GetNodesRequest(node_ids=node_ids, page=page),
    )
    return list(response.nodes), response.next_page_token


@dataclass(frozen=True, slots=True)
class _NodesDirectory(tree.Directory):
    """All nodes, in id order."""

    caller: Caller
    objects: _ObjectDirectory

    def children(self, prefix: str = "") -> Iterator[tree.Child]:
        for node in chain.from_iterable(_pages(partial(_get_nodes, self.caller, ()))):
            if str(node.node_id).startswith(prefix):
                yield tree.Child(str(node.node_id), self._directory(node.node_id))

    def child(self, name: str) -> tree.Node | None:
        node_id = parse_id(name)
        # Ids of nodes have 32 bits in the contract. A larger one can't be sent.
        if node_id is None or node_id >= 2**31 or self._read(node_id) is None:
            return None
        return self._directory(node_id)

    def _directory(self, node_id: int) -> tree.Directory:
        return _FixedDirectory(
            {
                # Read when it is shown, so that a listing of nodes sends no further requests.
                "info": tree.File(lambda: self._read(node_id)),
                "stream_set_objects": _SetObjectDirectory(self.caller, self.objects, node_id),
            }
        )

    def _read(self, node_id: int) -> tree.Document | None:
        found, _ = _get_nodes(self.caller, [node_id], common_pb2.PageRequest())
        return documents.node(found[0]) if found else None


@dataclass(frozen=True, slots=True)
class _SetObjectDirectory(tree.Directory):
    """The stream set objects of one node, in the node's order."""

    caller: Caller
    objects: _ObjectDirectory
    node_id: int

    def children(self, prefix: str = "") -> Iterator[tree.Child]:
        every = chain.from_iterable(_pages(self._list))
        for listed in sorted(every, key=lambda one: (one.order_id, one.object_id)):
            if str(listed.object_id).startswith(prefix):
                yield tree.Child(str(listed.object_id), tree.File(partial(self._read, listed)))

    def _list(self, page: common_pb2.PageRequest) -> Listing[nodes_pb2.StreamSetObject]:
        listed = self.caller.call(
            lambda channel: nodes_pb2_grpc.NodeServiceStub(channel).ListStreamSetObjects,
            nodes_pb2.ListStreamSetObjectsRequest(node_id=self.node_id, page=page),
        )
        return list(listed.objects), listed.next_page_token

    def _read(self, listed: nodes_pb2.StreamSetObject) -> tree.Document | None:
        # The listing has no details, so the object itself is described.
        document = self.objects.fetch([listed.object_id]).get(listed.object_id)
        return document and documents.with_order(document, listed)


def _list_keys(caller: Caller, request: kv_pb2.ListKVsRequest) -> kv_pb2.ListKVsResponse:
    return caller.call(lambda channel: kv_pb2_grpc.KVServiceStub(channel).ListKVs, request)


@dataclass(frozen=True, slots=True)
class _NamespaceDirectory(tree.Directory):
    """The namespaces of keys, the default one first."""

    caller: Caller

    def children(self, prefix: str = "") -> Iterator[tree.Child]:
        # The default namespace always comes first, so it is left out of the listing.
        named = (filter(None, page) for page in _pages(self._list))
        for namespace in chain([""], chain.from_iterable(named)):
            name = namespace_name(namespace)
            if name.startswith(prefix):
                yield tree.Child(name, _KeyDirectory(self.caller, namespace))

    def _list(self, page: common_pb2.PageRequest) -> Listing[str]:
        listed = _list_keys(self.caller, kv_pb2.ListKVsRequest(namespaces=True, page=page))
        return list(listed.namespace_names), listed.next_page_token


def namespace_name(namespace: str) -> str:
    """Return the directory name of a namespace, escaped if it equals the default's."""
    if not namespace:
        return DEFAULT_NAMESPACE
    name = tree.name_of(namespace)
    return name.replace("_", "%5F", 1) if name == DEFAULT_NAMESPACE else name


@dataclass(frozen=True, slots=True)
class _KeyDirectory(tree.Directory):
    """The keys of one namespace, in key order."""

    caller: Caller
    namespace: str

    def children(self, prefix: str = "") -> Iterator[tree.Child]:
        for entry in chain.from_iterable(_pages(partial(self._list, _key_prefix(prefix)))):
            name = tree.name_of(entry.key)
            # A prefix that ends within a %XX is shortened for the request, so compare the names
            # again.
            if name.startswith(prefix):
                yield tree.Child(name, tree.File(partial(self._read, entry.key)))

    def child(self, name: str) -> tree.Node | None:
        # A name that no key can have needs no request.
        key = tree.text_of(name)
        document = self._read(key) if key else None
        return None if document is None else tree.File(lambda: document)

    def _list(self, key_prefix: str, page: common_pb2.PageRequest) -> Listing[kv_pb2.KVEntry]:
        request = kv_pb2.ListKVsRequest(
            namespace=self.namespace, prefix=key_prefix, keys_only=True, page=page
        )
        listed = _list_keys(self.caller, request)
        return list(listed.entries), listed.next_page_token

    def _read(self, key: str) -> tree.Document | None:
        """Read the key: it is the first, in key order, of the keys that begin with it."""
        request = kv_pb2.ListKVsRequest(
            namespace=self.namespace, prefix=key, page=common_pb2.PageRequest(page_size=1)
        )
        for entry in _list_keys(self.caller, request).entries:
            if entry.key == key:
                return documents.key_value(self.namespace, entry)
        return None


def _key_prefix(name_prefix: str) -> str:
    """Return the common beginning of the keys of names with this prefix, without a cut %XX."""
    return tree.text_of(name_prefix) or name_prefix.partition("%")[0]
