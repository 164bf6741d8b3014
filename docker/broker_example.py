"""The least a broker does: create streams, write records, read them back, give the streams up.

Needs the controllers of a cluster and its bucket; credentials come from AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY.
"""

import argparse
import asyncio
from pathlib import Path

from streammeta.client import Stream, StreamClient
from streammeta.tls.files import tls_files

STREAMS = 3
PAYLOADS = [f"record {number}".encode() for number in range(100)]


async def main() -> None:
    """Runs the example against the cluster that the command line names."""
    arguments = parse_arguments()
    async with StreamClient.open(
        arguments.connect.split(","),
        arguments.store,
        node_id=arguments.node_id,
        tls=tls_files(arguments.tls_ca, arguments.tls_cert, arguments.tls_key),
    ) as client:
        streams = [await client.create_stream(topic="example") for _ in range(STREAMS)]
        await write(streams)
        await read(streams)
        (await client.close_streams([stream.id for stream in streams])).require_all()


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python broker_example.py --connect 127.0.0.1:9091 --store file:///tmp/bucket",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--connect", required=True, help="controllers: HOST:PORT,...")
    parser.add_argument(
        "--store", required=True, help="the cluster's bucket, as its controllers name it"
    )
    parser.add_argument("--node-id", type=int, default=1, help="this broker's id (default: 1)")
    for name in ("--tls-ca", "--tls-cert", "--tls-key"):
        parser.add_argument(
            name, type=Path, help="this broker's, as `streammeta certs` makes it; none: plain text"
        )
    return parser.parse_args()


async def write(streams: list[Stream]) -> None:
    """Appends to all streams, and waits until every record is committed."""
    await asyncio.gather(*(stream.append(PAYLOADS) for stream in streams))
    for stream in streams:
        print(f"committed {len(PAYLOADS)} records to stream {stream.id}")


async def read(streams: list[Stream]) -> None:
    """Reads each stream from its beginning and compares it with the written records."""
    for stream in streams:
        payloads = [bytes(record.payload) async for record in stream]
        if payloads != PAYLOADS:
            raise SystemExit(f"stream {stream.id} differs from the written records")
        print(f"read {len(payloads)} records of stream {stream.id}")


if __name__ == "__main__":
    asyncio.run(main())
