"""One stock client that authenticates by SASL/PLAIN: produces and reads; prints one JSON object.

Arguments: the client, servers, file of the authorities ("" for plain text), user, password.
"""

import asyncio
import io
import json
import logging
import ssl
import sys
import time
from typing import Any

CLIENT, SERVERS, AUTHORITIES, USER, PASSWORD = sys.argv[1:6]
PROTOCOL = "SASL_SSL" if AUTHORITIES else "SASL_PLAINTEXT"
TOPIC = f"sasl-{CLIENT}"
PATIENCE_S = 60.0
CLOSE_TIMEOUT_S = 60.0
LOGGED = io.StringIO()
logging.basicConfig(stream=LOGGED, level=logging.WARNING)


def confluent() -> Any:
    """Use confluent-kafka."""
    from confluent_kafka import Consumer, KafkaException, Producer

    errors: list[str] = []
    settings: dict[str, Any] = {
        "bootstrap.servers": SERVERS,
        "security.protocol": PROTOCOL,
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": PASSWORD,
        "error_cb": lambda error: errors.append(error.name()),
    }
    if AUTHORITIES:
        settings["ssl.ca.location"] = AUTHORITIES
    producer = Producer(settings)
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    while True:  # it tries a wrong password again until its caller's patience ends
        try:
            producer.list_topics(timeout=1)
            break
        except KafkaException:
            producer.poll(0)
            if "_AUTHENTICATION" in errors:
                return {"error": "SASL_AUTHENTICATION_FAILED"}
            if time.monotonic() > deadline:
                return {"error": errors}
    producer.produce(TOPIC, b"value")
    left = producer.flush(PATIENCE_S)
    consumer = Consumer({**settings, "group.id": TOPIC, "auto.offset.reset": "earliest"})
    consumer.subscribe([TOPIC])
    found = consumer.consume(1, PATIENCE_S)
    consumer.close()
    return {"left": left, "read": [(message.value() or b"").decode() for message in found]}


def kafka_python() -> Any:
    """Use kafka-python."""
    from kafka import KafkaConsumer, KafkaProducer
    from kafka.errors import KafkaError

    settings = {
        "bootstrap_servers": SERVERS,
        "security_protocol": PROTOCOL,
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": USER,
        "sasl_plain_password": PASSWORD,
        "ssl_cafile": AUTHORITIES or None,
        "bootstrap_timeout_ms": 20_000,
    }
    try:
        producer = KafkaProducer(**settings)
        producer.send(TOPIC, b"value").get(PATIENCE_S)
    except KafkaError as error:
        return {"error": _named(error)}
    consumer = KafkaConsumer(TOPIC, auto_offset_reset="earliest", group_id=TOPIC, **settings)
    found = next(iter(consumer))
    consumer.close()
    producer.close()
    return {"left": 0, "read": [found.value.decode()]}


async def _aiokafka() -> Any:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
    from aiokafka.errors import KafkaError

    settings = {
        "bootstrap_servers": SERVERS,
        "security_protocol": PROTOCOL,
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": USER,
        "sasl_plain_password": PASSWORD,
        "ssl_context": ssl.create_default_context(cafile=AUTHORITIES) if AUTHORITIES else None,
    }
    producer = AIOKafkaProducer(**settings)
    try:
        await producer.start()
    except KafkaError as error:
        await producer.stop()
        return {"error": _named(error)}
    await producer.send_and_wait(TOPIC, b"value")
    await producer.stop()
    consumer = AIOKafkaConsumer(TOPIC, auto_offset_reset="earliest", group_id=TOPIC, **settings)
    await consumer.start()
    async with asyncio.timeout(PATIENCE_S):
        found = await consumer.getone()
    await consumer.stop()
    return {"left": 0, "read": [found.value.decode()]}


def aiokafka() -> Any:
    """Use aiokafka."""
    return asyncio.run(_aiokafka())


def _named(error: Exception) -> str:
    """Return the broker's error if a client has logged it: it raises that no broker was reached."""
    is_refused = "SaslAuthenticationFailed" in LOGGED.getvalue() + repr(error)
    return "SASL_AUTHENTICATION_FAILED" if is_refused else repr(error)


CLIENTS = {"confluent": confluent, "kafka_python": kafka_python, "aiokafka": aiokafka}
print(json.dumps(CLIENTS[CLIENT]()))
