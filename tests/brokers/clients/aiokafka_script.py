"""Operations of aiokafka against a broker: prints one JSON object."""

import asyncio
import json
import sys

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

SERVERS, TOPIC = sys.argv[1:3]
COUNT = 500


async def main() -> None:
    """Create, produce idempotently, consume as a group, commit, read back."""
    admin = AIOKafkaAdminClient(bootstrap_servers=SERVERS)
    await admin.start()
    await admin.create_topics([NewTopic(TOPIC, 2, 1)])
    await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=SERVERS, enable_idempotence=True) as producer:
        sent = [await producer.send(TOPIC, f"value {number}".encode()) for number in range(COUNT)]
        results = await asyncio.gather(*sent, return_exceptions=True)
    failed = [str(result) for result in results if isinstance(result, Exception)]
    consumer = AIOKafkaConsumer(
        TOPIC,
        bootstrap_servers=SERVERS,
        group_id=f"{TOPIC}-group",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    seen: list[str] = []
    async with asyncio.timeout(60):
        while len(seen) < COUNT:
            seen.append((await consumer.getone()).value.decode())
    await consumer.commit()
    places = [TopicPartition(TOPIC, partition) for partition in range(2)]
    committed = sum([await consumer.committed(place) or 0 for place in places])
    ends = sum((await consumer.end_offsets(places)).values())
    await consumer.stop()
    wanted = sorted(f"value {number}" for number in range(COUNT))
    answer = {"failed": failed, "left": 0, "same": sorted(seen) == wanted}
    print(json.dumps({**answer, "committed": committed, "ends": ends}))


asyncio.run(main())
