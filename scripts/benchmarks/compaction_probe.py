"""The process whose memory and CPU time are measured while it compacts, on one core.

    python -m scripts.benchmarks.compaction_probe --endpoint H:P --store URI --node-id N \
        --node-epoch N --budget-mib N [--profile FILE]
    python -m scripts.benchmarks.compaction_probe --copy --store URI

The second way copies the objects of a bucket one by one, with the same longest read and in one
request each: what the store gives, with nothing of Python's but the loop. Prints one JSON object.
"""

import argparse
import asyncio
import cProfile
import json
import os
import resource
import sys
import time
from pathlib import Path

from streammeta.client import ControllerClient
from streammeta.client.compaction.config import CompactionConfig, CompactionTarget
from streammeta.client.compaction.report import CompactionReport
from streammeta.client.compaction.set_object_compactor import SetObjectCompactor
from streammeta.storage.compaction.selection import SelectionConfig
from streammeta.storage.object_store.address import open_object_store
from streammeta.storage.object_store.base import ObjectStore

MIB = 1 << 20
COPY_KEY = "copied"

Figures = dict[str, float]


async def compact(
    arguments: argparse.Namespace, store: ObjectStore
) -> tuple[CompactionReport, int]:
    """Compact all set objects of a node together, as many as a group may have.

    Also returns the memory the process had, in bytes, when everything was loaded and connected.
    """
    target = CompactionTarget(arguments.node_id, arguments.node_epoch)
    config = CompactionConfig(
        memory_budget=arguments.budget_mib * MIB, selection=SelectionConfig(growth=1)
    )
    async with ControllerClient([arguments.endpoint]) as client:
        namespace = await client.object_namespace()
        compactor = SetObjectCompactor(client, target.identity, namespace, store, config)
        try:
            await compactor.plan(target)
            resident_before = _resident_bytes("VmRSS")
            return await compactor.run_once(target), resident_before
        finally:
            compactor.close()


def copy(store: ObjectStore) -> int:
    """Copy every object and delete the copy; return the bytes copied."""
    copied = 0
    for info in list(store.list_objects()):
        data = bytearray(info.size)
        store.read_into(info.key, 0, [memoryview(data)])
        store.put(COPY_KEY, data)
        copied += info.size
    store.delete_many([COPY_KEY])
    return copied


def main() -> int:
    """Do what the command line says and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--copy", action="store_true")
    parser.add_argument("--endpoint")
    for name in ("--node-id", "--node-epoch", "--budget-mib"):
        parser.add_argument(name, type=int)
    parser.add_argument("--profile", type=Path)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    store = open_object_store(arguments.store)
    began, cpu_before = time.monotonic(), _cpu_s()
    if arguments.copy:
        figures: Figures = {"bytes_written": copy(store), "seconds": time.monotonic() - began}
    else:
        report, resident_before = _profiled(arguments, store)
        if report.failures or report.left_out:
            print(f"failed: {report.failures}, left out: {report.left_out}", file=sys.stderr)
            return 1
        figures = _of_report(report)
        figures["resident_before_mib"] = resident_before / MIB
    user_s, system_s = (now - then for now, then in zip(_cpu_s(), cpu_before, strict=True))
    figures |= {
        "user_s": user_s,
        "system_s": system_s,
        "peak_resident_mib": _resident_bytes("VmHWM") / MIB,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    return 0


def _profiled(arguments: argparse.Namespace, store: ObjectStore) -> tuple[CompactionReport, int]:
    if arguments.profile is None:
        return asyncio.run(compact(arguments, store))
    # CPU time of the event loop's thread; waiting is not work.
    profile = cProfile.Profile(time.thread_time)
    try:
        return profile.runcall(asyncio.run, compact(arguments, store))
    finally:
        profile.dump_stats(arguments.profile)


def _of_report(report: CompactionReport) -> Figures:
    done = report.figures
    return {
        "seconds": report.seconds,
        "bytes_read": done.bytes_read,
        "bytes_written": done.bytes_written,
        "gets": done.gets,
        "puts": done.puts,
        "multiparts": done.multiparts,
        "parts": done.parts,
        "iterations": done.iterations,
        "commits": done.commits,
        "sources": sum(len(each.source_ids) for each in report.groups),
        "set_objects": sum(len(each.set_object_ids) for each in report.groups),
        "stream_objects": sum(len(each.stream_object_ids) for each in report.groups),
    }


def _cpu_s() -> tuple[float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def _resident_bytes(name: str) -> int:
    """Return the memory this program has (VmRSS), or has had at most (VmHWM).

    The kernel counts both anew for a program; not so what `getrusage` calls the maximum.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
