"""Bucket of any size that can only be listed, served over HTTP by a separate process.

It stands in for S3 in measurements of the caller's cost: it answers only ListObjectsV2, with keys
made on the fly, and costs little itself. It verifies no signatures.
"""

import bisect
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from streammeta.cli.local.local_cluster import READY_PREFIX
from streammeta.storage.object_format.object_key import cluster_namespace, key_for

NAMESPACE = cluster_namespace("bench")
OBJECT_BYTES = 1000
MODIFIED_MS = 1_700_000_000_000
"""Latest time at which an object was modified."""

_PAGE = 1000
_DAY_MS = 86_400_000
ETAG_STEP = 0x9E3779B97F4A7C15F39CC0605CEDC835
"""2^128 divided by the golden ratio. Its multiples are etags that differ without a pattern."""


def _entry(key: str) -> str:
    """Return a key as S3 lists it, with its own time and etag."""
    object_id = int(key.rpartition("/")[2])
    modified_s = (MODIFIED_MS - object_id * 7919 % _DAY_MS) / 1000
    modified = datetime.fromtimestamp(modified_s, UTC).isoformat(timespec="milliseconds")
    return (
        f"<Contents><Key>{key}</Key><LastModified>{modified[:23]}Z</LastModified>"
        f"<ETag>&quot;{object_id * ETAG_STEP % 2**128:032x}&quot;</ETag>"
        f"<Size>{OBJECT_BYTES}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


class Listing:
    """The keys of objects 0 to `keys` - 1, in the order of a bucket."""

    def __init__(self, keys: int) -> None:
        self._keys = sorted(key_for(object_id, NAMESPACE) for object_id in range(keys))

    def page(self, query: str) -> bytes:
        """Return the answer to the query of a ListObjectsV2 request."""
        options = {name: values[0] for name, values in parse_qs(query).items()}
        token, after = options.get("continuation-token"), options.get("start-after", "")
        start = int(token) if token else bisect.bisect_right(self._keys, after)
        end = min(start + _PAGE, len(self._keys))
        more = f"<NextContinuationToken>{end}</NextContinuationToken>"
        is_truncated = end < len(self._keys)
        return (
            "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult"
            ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><EncodingType>url</EncodingType>'
            f"<IsTruncated>{str(is_truncated).lower()}</IsTruncated>{more * is_truncated}"
            f"{''.join(map(_entry, self._keys[start:end]))}</ListBucketResult>"
        ).encode()


def serve(*, keys: int) -> None:
    """Serve until the process is ended. The ready line has the port."""
    listing = Listing(keys)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            """Answer with a page."""
            body = listing.page(urlsplit(self.path).query)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_message: object) -> None:
            """Write no log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"{READY_PREFIX}{server.server_port}", flush=True)
    server.serve_forever()
