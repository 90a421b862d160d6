"""A scripted Triton as a program: `python -m tests.attacks.scripted_engine CARD TOKENS SECONDS_PER_TOKEN`.

Writes its port, and one line per request, to the standard output.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from tests.support.scripted_triton import ScriptedTriton, Step


async def main(card: str, tokens: int, seconds: float) -> None:
    async def answer(tensors: dict) -> AsyncIterator[Step]:
        print("request", flush=True)
        for _ in range(min(tokens, tensors["request_output_len"][0])):
            yield Step((5,), wait=seconds)
        yield Step(final=True)

    triton = ScriptedTriton(json.loads(Path(card).read_text()), answer)
    await triton.start()
    print(f"listens on {triton.port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
