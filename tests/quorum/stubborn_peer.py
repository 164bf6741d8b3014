"""A peer in a process of its own, to be killed and stopped: answers votes, never a Fetch.

Run as `python -m tests.quorum.stubborn_peer CLUSTER NODE_ID`; prints `ready HOST:PORT`.
"""

import asyncio
import sys

from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.peers.dialled import Identity
from streammeta.controller.peers.server import PeerServer
from tests.quorum.fake_replica import FakeReplica


async def _serve(identity: Identity) -> None:
    server = PeerServer(FakeReplica(identity.node_id), identity)
    port = await server.start("127.0.0.1:0")
    print(f"ready 127.0.0.1:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(Identity(ClusterId(sys.argv[1]), NodeId(int(sys.argv[2])))))
