"""The least a broker does: create streams, write records, read them back, give the streams up.

Needs the controllers of a cluster and its bucket; credentials come from AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY.
"""

import argparse
import asyncio
from pathlib import Path

from streammeta.client import StreamClient
from streammeta.tls.files import tls_files

STREAMS = 3
RECORDS_PER_STREAM = 100


async def main() -> None:
    """Runs the example against the cluster that the command line names."""
    arguments = parse_arguments()
    async with await StreamClient.open(
        arguments.connect.split(","),
        arguments.store,
        node_id=arguments.node_id,
        tls=tls_files(arguments.tls_ca, arguments.tls_cert, arguments.tls_key),
    ) as client:
        stream_ids = await client.create_streams([{"topic": "example"}] * STREAMS)
        await write(client, stream_ids)
        await read(client, stream_ids)
        (await client.close_streams(stream_ids)).require_all()


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


async def write(client: StreamClient, stream_ids: list[int]) -> None:
    """Opens the streams, appends to all of them, and waits until every record is committed."""
    (await client.open_streams(stream_ids)).require_all()
    acks = [
        await client.writer.append(stream_id, f"record {number}".encode())
        for number in range(RECORDS_PER_STREAM)
        for stream_id in stream_ids
    ]
    await client.flush()
    await asyncio.gather(*acks)  # raises if a record was rejected
    print(f"committed {len(acks)} records to streams {stream_ids}")


async def read(client: StreamClient, stream_ids: list[int]) -> None:
    """Reads each stream from its beginning and compares it with the written records."""
    wanted = [f"record {number}".encode() for number in range(RECORDS_PER_STREAM)]
    for stream_id in stream_ids:
        payloads = [bytes(batch.payload) async for batch in client.iterate(stream_id)]
        if payloads != wanted:
            raise SystemExit(f"stream {stream_id} differs from the written records")
        print(f"read {len(payloads)} records of stream {stream_id}")


if __name__ == "__main__":
    asyncio.run(main())
