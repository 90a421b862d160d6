"""Runs `llmops` for a page's script, in a fork of a loaded process (tests/support/forked_cli.py).

Servers stay in the background, on the ports that the script may use.

Their process ids are appended to the file `pids` of the current folder.
"""

import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path

READY = re.compile(r"listens on http|^Ready(\.| after) ", re.M)


def main(arguments: list[str]) -> int:
    ports = json.loads(os.environ["DOCS_PORTS"])
    serve = {"--grpc-port": "8001", "--metrics-port": "8002", "--http-port": "8000"}
    front, control = {"--port": "9000"}, {"--port": "9100"}
    options = {"gateway": front, "up": front, "control": control, "serve": serve}.get(arguments[0])
    file, _, address = os.environ["DOCS_FORKS"].partition(",")
    forks = importlib.util.spec_from_file_location("forked_cli", file)
    module = importlib.util.module_from_spec(forks)
    forks.loader.exec_module(module)
    if options is None:
        return module.ask(address, arguments, os.getcwd(), dict(os.environ), [0, 1, 2])
    for option, port in options.items():
        if option not in arguments:
            arguments += [option, ports[port]]
    if arguments[0] == "serve":
        arguments.append("--http")
    if arguments[0] == "gateway" and not {"--triton", "--replica"} & set(arguments):
        arguments += ["--triton", f"127.0.0.1:{ports['8001']}"]
    log = Path(f"{arguments[0]}-{time.monotonic_ns()}.log")
    with log.open("w") as output:
        process = module.ForkedProcess(arguments, os.environ, output.fileno(), address)
    with open("pids", "a") as pids:
        pids.write(f"{process.pid}\n")
    deadline = time.monotonic() + 180
    while not READY.search(log.read_text()):
        if process.poll() is not None or time.monotonic() > deadline:
            print(log.read_text()[-3000:])
            return 1
        time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
