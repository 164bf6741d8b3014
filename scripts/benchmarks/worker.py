"""Process that calls one function of the benchmarks and prints the result as a line of JSON.

    python -m scripts.benchmarks.worker MODULE:FUNCTION '{"argument": "value"}'

A coroutine function runs on uvloop, as the controllers do.
"""

import importlib
import inspect
import json
import sys

import uvloop


def main() -> None:
    """Call the function named on the command line."""
    place, arguments = sys.argv[1:]
    module, _, name = place.partition(":")
    function = getattr(importlib.import_module(module), name)
    result = function(**json.loads(arguments))
    if inspect.iscoroutine(result):
        result = uvloop.run(result)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
