"""Looks at raftos 0.2.6 from outside, one claim a subcommand, inside an environment that has it.

Started by scripts/evaluate_raftos; prints one JSON object with what was observed. Three things
are shimmed, so that the probes test raftos' protocol and storage, not its age: the arguments
`asyncio.Queue(loop=)` and `unpackb(encoding=)` that are gone from current Python and msgpack, and
msgpack's refusal of the newline that raftos leaves after each entry it reads. It knows nothing of
streammeta.
"""

import asyncio
import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

ANSWER_DEADLINE_S = 5.0  # for one datagram or one commit on an idle loopback
ELECTION_DEADLINE_S = 30.0
LEADER, FOLLOWER = "leader", "follower"  # what a node prints when its role changes
ACKNOWLEDGED, UNANSWERED, REFUSED = "acknowledged", "no acknowledgement", "refused"


def load_raftos(folder: Path, heartbeat_s: float) -> Any:
    """Imports raftos with the three shims, set up to keep its files in `folder`."""
    queue = asyncio.Queue
    msgpack: Any = importlib.import_module("msgpack")

    def unpack_first(data: bytes, **_: object) -> object:
        unpacker = msgpack.Unpacker(raw=False)
        unpacker.feed(data)
        return unpacker.unpack()

    asyncio.Queue = lambda maxsize=0, loop=None: queue(maxsize)  # type: ignore[assignment,misc]
    msgpack.unpackb = unpack_first
    raftos = importlib.import_module("raftos")
    raftos.configure({"log_path": f"{folder}/", "heartbeat_interval": heartbeat_s})
    return raftos


def free_udp_ports(count: int) -> list[int]:
    """Finds ports by binding them all at once, so that no two are the same."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


# A node, as a separate process. It says "ready", then its role whenever that changes, and answers
# "set N" on its input with what became of writing an N-byte value.


async def run_node(folder: Path, heartbeat_s: float, ports: list[int]) -> None:
    """Runs the node of the first port until its input ends, so that it never outlives us."""
    raftos = load_raftos(folder, heartbeat_s)
    for role, event in ((LEADER, "on_leader"), (FOLLOWER, "on_follower")):
        raftos.configure({event: functools.partial(print, role, flush=True)})
    addresses = [f"127.0.0.1:{port}" for port in ports]
    await raftos.register(addresses[0], cluster=addresses)
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        size = int(line.split()[1])
        write = raftos.State.set_value(f"key-{size}", b"x" * size)
        try:
            await asyncio.wait_for(write, ANSWER_DEADLINE_S)
        except TimeoutError:
            print(UNANSWERED, flush=True)
        except raftos.exceptions.NotALeaderException:
            print(REFUSED, flush=True)
        else:
            print(ACKNOWLEDGED, flush=True)


class NodeProcess:
    """A raftos node that can be killed and started again on the same files."""

    def __init__(self, folder: Path, heartbeat_s: float, ports: list[int]) -> None:
        arguments = ["node", str(folder), str(heartbeat_s), *map(str, ports)]
        self.errors = folder / f"node-{ports[0]}.stderr"
        with self.errors.open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        os.set_blocking(self._output(), False)
        self.lines: list[str] = []
        self._pending = b""

    def _output(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def poll_lines(self) -> list[str]:
        """Every line printed so far."""
        try:
            self._pending += os.read(self._output(), 65536)
        except BlockingIOError:
            return self.lines
        *complete, self._pending = self._pending.split(b"\n")
        self.lines += [line.decode() for line in complete]
        return self.lines

    def wait_for(self, wanted: Callable[[list[str]], bool], deadline_s: float) -> None:
        """Waits until the lines printed so far are as wanted."""
        wait_until(lambda: wanted(self.poll_lines()), deadline_s, str(self.errors))

    def leads(self) -> bool:
        """Whether the node last said that it leads."""
        roles = [line for line in self.poll_lines() if line in (LEADER, FOLLOWER)]
        return roles[-1:] == [LEADER]

    def set_value(self, size: int) -> str:
        """Has the node write a value of `size` bytes and returns its answer."""
        answers = (ACKNOWLEDGED, UNANSWERED, REFUSED)
        before = sum(line in answers for line in self.poll_lines())
        assert self.process.stdin is not None
        self.process.stdin.write(f"set {size}\n".encode())
        self.process.stdin.flush()
        deadline_s = ANSWER_DEADLINE_S + 5
        self.wait_for(lambda lines: sum(each in answers for each in lines) > before, deadline_s)
        return [line for line in self.lines if line in answers][-1]

    def kill(self) -> None:
        """Ends the process as a crash would, and waits for it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def wait_until(condition: Callable[[], bool], deadline_s: float, where: str) -> None:
    """Waits for a condition; past the deadline it says where to look."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            detail = Path(where).read_text(errors="replace")[-400:]
            raise TimeoutError(f"a raftos node did not do its part in {deadline_s} s: {detail}")
        time.sleep(0.02)


# The claims.


def probe_vote(folder: Path) -> dict[str, Any]:
    """Asks a node for its vote, kills it, starts it again, and asks for another candidate."""
    raftos = load_raftos(folder, 0.3)
    node, first, second = free_udp_ports(3)
    answers = [vote_of_a_fresh_process(raftos, folder, node, port) for port in (first, second)]
    granted = [bool(answer.get("vote_granted")) for answer in answers]
    terms = [answer.get("term") for answer in answers]
    return {
        "observed": f"term {terms[0]}: vote for candidate A granted={granted[0]}; kill -9, start; "
        f"term {terms[1]}: vote for candidate B granted={granted[1]}",
        "reproduced": granted == [True, True] and terms == [7, 7],
    }


def vote_of_a_fresh_process(raftos: Any, folder: Path, port: int, candidate: int) -> dict[str, Any]:
    """Starts a node, requests its vote in term 7 and returns its reply."""
    # A heartbeat of ten minutes keeps the node from standing for election itself.
    process = NodeProcess(folder, 600.0, [port, candidate])
    try:
        process.wait_for(lambda lines: "ready" in lines, ELECTION_DEADLINE_S)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as candidate_socket:
            candidate_socket.bind(("127.0.0.1", candidate))
            candidate_socket.settimeout(ANSWER_DEADLINE_S)
            request = {
                "type": "request_vote",
                "term": 7,
                "candidate_id": f"127.0.0.1:{candidate}",
                "last_log_index": 0,
                "last_log_term": 0,
            }
            datagram = raftos.config.cryptor.encrypt(raftos.config.serializer.pack(request))
            candidate_socket.sendto(datagram, ("127.0.0.1", port))
            try:
                reply = candidate_socket.recv(65536)
            except TimeoutError:
                return {}
        answer: dict[str, Any] = raftos.config.serializer.unpack(
            raftos.config.cryptor.decrypt(reply)
        )
        return answer
    finally:
        process.kill()


def probe_fsync(folder: Path) -> dict[str, Any]:
    """Counts what reaches the disk while votes and log entries are written."""
    raftos = load_raftos(folder, 0.3)
    storage = importlib.import_module("raftos.storage")
    syncs = 0

    def count_sync(*_: object) -> None:
        nonlocal syncs
        syncs += 1

    for call in ("fsync", "fdatasync", "sync"):
        setattr(os, call, count_sync)
    opened = synchronous = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal opened, synchronous
        if event == "open" and str(arguments[0]).startswith(str(folder)):
            opened += 1
            synchronous += bool(int(arguments[2]) & (os.O_SYNC | os.O_DSYNC))

    sys.addaudithook(watch)
    log, votes = storage.Log("node"), storage.FileStorage("node")
    for number in range(100):
        log.write(1, {"key": "value"})
        votes.update({"voted_for": str(number)})
    named = sum(len(re.findall(r"f(?:data)?sync", source)) for source in sources(raftos))
    return {
        "observed": f"100 entries and 100 votes: {opened} files opened, {synchronous} of them "
        f"synchronous, {syncs} calls of fsync or fdatasync; its source names them {named} times",
        "reproduced": opened >= 200 and synchronous == syncs == named == 0,
    }


def probe_newline(folder: Path) -> dict[str, Any]:
    """Writes one entry with a newline among its bytes and one without; opens both logs again."""
    load_raftos(folder, 0.3)
    outcomes = [read_back(value) for value in (b"one two", b"one\ntwo", 10)]
    return {
        "observed": f"opening a log with the one value b'one two': {outcomes[0]}; "
        f"with b'one\\ntwo': {outcomes[1]}; "
        f"with the number 10, in msgpack the byte of a newline: {outcomes[2]}",
        "reproduced": [outcome == "intact" for outcome in outcomes] == [True, False, False],
    }


def read_back(value: object) -> str:
    """Writes a log of one entry and says what opening it again gives."""
    storage = importlib.import_module("raftos.storage")
    name = f"log-of-{value!r}"
    storage.Log(name).write(1, {"key": value})
    try:
        entries = storage.Log(name).cache
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return f"fails with {type(error).__name__} {error}".strip()
    return "intact" if entries == [{"term": 1, "command": {"key": value}}] else f"{entries}"


def probe_datagram(folder: Path) -> dict[str, Any]:
    """Lets a cluster of three commit 100 bytes, then 50 kB, then 101 bytes on the leader."""
    ports = free_udp_ports(3)
    orders = [ports[at:] + ports[:at] for at in range(3)]
    nodes = [NodeProcess(folder, 0.1, order) for order in orders]
    try:
        leader = first_to_acknowledge(nodes, 100, ELECTION_DEADLINE_S)
        answer = leader.set_value(50_000)
        complaint = re.search(r"\[Errno \d+\][^\n]*", leader.errors.read_text(errors="replace"))
        try:
            first_to_acknowledge(nodes, 101, ANSWER_DEADLINE_S)
            afterwards = ACKNOWLEDGED
        except TimeoutError:
            afterwards = f"no node acknowledges it in {ANSWER_DEADLINE_S} s"
    finally:
        for node in nodes:
            node.kill()
    cause = complaint.group() if complaint else "nothing logged"
    return {
        "observed": f"three nodes; 100 bytes: {ACKNOWLEDGED}; 50 000 bytes: {answer} in "
        f"{ANSWER_DEADLINE_S} s ({cause}); 101 bytes afterwards: {afterwards}",
        "reproduced": answer == UNANSWERED,
    }


def first_to_acknowledge(nodes: list[NodeProcess], size: int, deadline_s: float) -> NodeProcess:
    """Has whichever node leads write a value, again if it lost the lead, until one succeeds."""
    deadline = time.monotonic() + deadline_s
    while (left_s := deadline - time.monotonic()) > 0:
        wait_until(lambda: any(node.leads() for node in nodes), left_s, str(nodes[0].errors))
        leader = next(node for node in nodes if node.leads())
        if leader.set_value(size) == ACKNOWLEDGED:
            return leader
    raise TimeoutError(f"no raftos node acknowledged {size} bytes in {deadline_s} s")


def probe_snapshot(folder: Path) -> dict[str, Any]:
    """Overwrites one key a thousand times and counts the kept entries."""
    raftos = load_raftos(folder, 0.3)
    storage = importlib.import_module("raftos.storage")
    log = storage.Log("node")
    for _ in range(1000):
        log.write(1, {"key": "value"})
    kept = len(storage.Log("node"))
    words = sum(len(re.findall(r"snapshot|compact", text, re.I)) for text in sources(raftos))
    return {
        "observed": f"one key written 1000 times: {kept} entries in a log of "
        f"{Path(log.filename).stat().st_size} bytes; its source names snapshots or compaction "
        f"{words} times",
        "reproduced": kept == 1000 and words == 0,
    }


def sources(package: Any) -> list[str]:
    """The source text of every module of a package."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return [inspect.getsource(module) for module in modules]


PROBES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "vote": probe_vote,
    "fsync": probe_fsync,
    "newline": probe_newline,
    "datagram": probe_datagram,
    "snapshot": probe_snapshot,
}


def main(arguments: list[str]) -> None:
    """Runs the probe, or the node, that the first argument names in the folder of the second."""
    name, folder = arguments[0], Path(arguments[1])
    if name == "node":
        ports = [int(port) for port in arguments[3:]]
        node: Coroutine[Any, Any, None] = run_node(folder, float(arguments[2]), ports)
        asyncio.run(node)
    else:
        print(json.dumps(PROBES[name](folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
