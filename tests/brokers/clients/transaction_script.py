"""Begin transactions by a stock client: CLIENT SERVERS. Prints the error that it ends with."""

from __future__ import annotations

import asyncio
import json
import sys


def by_confluent(servers: str) -> None:
    from confluent_kafka import Producer

    settings = {"bootstrap.servers": servers, "transactional.id": "pay"}
    Producer(settings).init_transactions(60)


def by_kafka_python(servers: str) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(bootstrap_servers=servers, transactional_id="pay")
    try:
        producer.init_transactions()
    finally:
        producer.close()


def by_aiokafka(servers: str) -> None:
    from aiokafka import AIOKafkaProducer

    async def begin() -> None:
        producer = AIOKafkaProducer(bootstrap_servers=servers, transactional_id="pay")
        try:
            await producer.start()
        finally:
            await producer.stop()

    asyncio.run(begin())


CLIENTS = {"confluent": by_confluent, "kafka_python": by_kafka_python, "aiokafka": by_aiokafka}

if __name__ == "__main__":
    try:
        CLIENTS[sys.argv[1]](sys.argv[2])
        told = "none"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        code = getattr(error.args[0], "name", None) if error.args else None
        told = code() if callable(code) else type(error).__name__
    print(json.dumps({"error": told}))
