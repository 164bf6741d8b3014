"""The least a broker does: create streams, write records, read them back, give the streams up.

Needs the controllers of a cluster and its bucket; credentials come from AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY.
"""

import argparse
import asyncio
import time

from streammeta.client import BrokerSession, ControllerClient, StreamReader, StreamWriter
from streammeta.storage.object_store.address import open_object_store
from streammeta.storage.object_store.base import ObjectStore

STREAMS = 3
RECORDS_PER_STREAM = 100
FIRST_EPOCH = 1


async def main() -> None:
    """Runs the example against the cluster that the command line names."""
    arguments = parse_arguments()
    store = open_object_store(arguments.store)
    client = ControllerClient(arguments.connect.split(","))
    try:
        # A node's epoch must grow with each start of its process; the clock does.
        node_epoch = time.time_ns() // 1_000_000
        session = await BrokerSession.register(client, arguments.node_id, node_epoch)
        stream_ids = await session.create_streams([{"topic": "example"}] * STREAMS)
        await write(session, store, stream_ids)
        await read(client, store, session.namespace, stream_ids)
        closed = await session.close_streams(dict.fromkeys(stream_ids, FIRST_EPOCH))
        closed.require_all()
    finally:
        await client.close()


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
    return parser.parse_args()


async def write(session: BrokerSession, store: ObjectStore, stream_ids: list[int]) -> None:
    """Opens the streams, appends to all of them, and waits until every record is committed."""
    opened = await session.open_streams(dict.fromkeys(stream_ids, FIRST_EPOCH))
    async with StreamWriter(session, store) as writer:
        writer.attach(opened.require_all().values())
        acks = [
            await writer.append(stream_id, f"record {number}".encode())
            for number in range(RECORDS_PER_STREAM)
            for stream_id in stream_ids
        ]
        await writer.flush()
        await asyncio.gather(*acks)  # raises if a record was refused
    print(f"committed {len(acks)} records to streams {stream_ids}")


async def read(
    client: ControllerClient, store: ObjectStore, namespace: str, stream_ids: list[int]
) -> None:
    """Reads each stream from its beginning and compares it with what was written."""
    wanted = [f"record {number}".encode() for number in range(RECORDS_PER_STREAM)]
    reader = StreamReader(client, store, namespace)
    try:
        for stream_id in stream_ids:
            payloads = [bytes(batch.payload) async for batch in reader.iterate(stream_id)]
            if payloads != wanted:
                raise SystemExit(f"stream {stream_id} reads back differently from what was written")
            print(f"read {len(payloads)} records of stream {stream_id}")
    finally:
        reader.close()


if __name__ == "__main__":
    asyncio.run(main())
