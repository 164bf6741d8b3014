"""An S3 server for tests in Java, with one bucket in the memory of this process.

Prints the address of the bucket once it answers. Ends with its standard input.
"""

import sys
from urllib.parse import quote

from moto.server import ThreadedMotoServer

from streammeta.storage.object_store.protocol.address import S3Config
from streammeta.storage.object_store.protocol.retry import RetryPolicy
from streammeta.storage.object_store.s3.s3_client import open_client

BUCKET = "bucket"

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
endpoint = quote(f"http://{host}:{port}", safe="")
address = f"s3://{BUCKET}?endpoint={endpoint}&accessKey=test&secretKey=test"
client = open_client(S3Config.from_uri(address), RetryPolicy())
client.create_bucket(Bucket=BUCKET)
client.close()

print(address, flush=True)
sys.stdin.read()
server.stop()
