"""`llmops gateway` and `llmops chat` as processes."""

import asyncio
import os
import pty
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.support import forked_cli
from tests.support.gateway_stack import Stack, running
from tests.support.scripted_triton import Step
from tests.support.servers import refuses
from tests.support.waiting import GENEROUS, eventually

LLMOPS = [sys.executable, "-c", "from llmops.cli.main import main; main()"]


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipes = dict.fromkeys(("stdout", "stderr"), asyncio.subprocess.PIPE)
    return await asyncio.create_subprocess_exec(*LLMOPS, *arguments, stdin=asyncio.subprocess.DEVNULL, **pipes)


async def gateway_on(stack: Stack, *flags: str) -> tuple[asyncio.subprocess.Process, str]:
    """Start a gateway, and return its process and URL."""
    process = await start("gateway", "--port", "0", "--triton", f"127.0.0.1:{stack.triton.port}", *flags)
    line = (await asyncio.wait_for(process.stdout.readline(), GENEROUS)).decode()
    return process, re.search(r"http://127\.0\.0\.1:\d+", line).group()


async def outcome(*arguments: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(forked_cli.run, *arguments)
    return done.returncode, done.stdout, done.stderr


async def test_port_0_prints_the_chosen_port_and_sigterm_ends_with_0(stack):
    process, url = await gateway_on(stack)
    stack.say("Hello")
    for _ in range(100):
        code, out, _ = await outcome("chat", "--url", url, "--once", "Hi")
        if code == 0:
            break
    assert out == "Hello\n"
    process.send_signal(signal.SIGTERM)
    _, err = await asyncio.wait_for(process.communicate(), GENEROUS)
    assert (process.returncode, "Traceback" in err.decode()) == (0, False), err.decode()


async def test_a_start_that_fails_after_the_port_was_bound_is_one_sentence(stack, tmp_path):
    """Before the fix, it was a traceback of uvicorn, and the exit code was 3."""
    (tmp_path / "outbox").touch()
    settings = tmp_path / "gateway.yaml"
    settings.write_text(f"store: sqlite:///{tmp_path / 'store.db'}\nusage: {{outbox: {tmp_path / 'outbox'}}}\n")
    process, _ = await gateway_on(stack, "--config", str(settings))
    _, err = await asyncio.wait_for(process.communicate(), GENEROUS)
    *_, last = err.decode().splitlines()
    assert (process.returncode, "Traceback" in err.decode()) == (1, False)
    assert re.fullmatch(r"Error: Usage cannot be written to \S+ \(.+\); make room there, or name .*\.", last)


@asynccontextmanager
async def terminated_while_it_answers(stack, process, url) -> AsyncIterator[None]:
    """Send SIGTERM to a gateway during an answer that does not end; the gateway ends it after the block."""
    stack.steps(Step((9,)), Step(hang=True))
    async with httpx.AsyncClient(base_url=url, timeout=GENEROUS) as client:
        await eventually(lambda: ready(client))
        async with client.stream("POST", "/v1/chat/completions", json={**stack.chat_body, "stream": True}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            yield
            with pytest.raises(httpx.RemoteProtocolError):
                [line async for line in lines]


async def test_a_second_signal_waits_for_no_answer_and_says_nothing_but_that(stack):
    process, url = await gateway_on(stack, "--log-level", "error")
    async with terminated_while_it_answers(stack, process, url):
        # it has heard of the first signal when it takes no connection any more
        await eventually(lambda: refuses(int(url.rpartition(":")[2])))
        process.send_signal(signal.SIGTERM)
    _, err = await asyncio.wait_for(process.communicate(), GENEROUS)
    assert (process.returncode, err.decode()) == (130, "Interrupted.\n")


async def test_answers_that_outlast_the_drain_end_without_a_traceback(stack, tmp_path):
    """Before the fix, uvicorn cancelled them, and logged the traceback of each."""
    settings = tmp_path / "gateway.yaml"
    settings.write_text("timeouts: {drain: 1s}\n")
    process, url = await gateway_on(stack, "--config", str(settings), "--log-level", "warning")
    async with terminated_while_it_answers(stack, process, url):
        pass
    _, err = await asyncio.wait_for(process.communicate(), GENEROUS)
    (line,) = err.decode().splitlines()
    assert (process.returncode, line.endswith("still open when draining ended: 1; they are closed.")) == (0, True)


def multiplied(levels: int) -> dict:
    """References that are ten times as many on each level."""
    parts = {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 10} for at in range(levels)}
    return {"$defs": {**parts, f"d{levels}": {"type": "object"}}, "allOf": [{"$ref": "#/$defs/d0"}] * 2}


HOSTILE = {
    "references": ({"guided_json": multiplied(10)}, 200, "yes"),
    "grammar": ({"guided_grammar": "root ::= " + "[" * 30_000}, 400, "is not closed"),
}


async def test_a_gateway_outlives_what_would_take_its_threads_for_ever(card, tokenizer):
    """A process of its own: work without an end would stop the test as well. Twice, as there are two threads."""
    guided = {**card, "capabilities": {**card["capabilities"], "guided": ["json_schema", "ebnf_grammar"]}}
    async with running(guided, tokenizer) as stack:
        stack.say("yes")
        process, url = await gateway_on(stack)
        try:
            async with httpx.AsyncClient(base_url=url, timeout=GENEROUS) as client:
                await eventually(lambda: ready(client))
                for name, (fields, status, says) in HOSTILE.items():
                    bodies = [{**stack.chat_body, **fields, "seed": seed} for seed in range(2)]
                    answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
                    assert [answer.status_code for answer in answers] == [status, status], name
                    assert all(says in answer.text for answer in answers), name
                    prompt = {"model": "tiny", "prompt": "Hello " * 10}
                    assert (await client.post("/tokenize", json=prompt)).status_code == 200, name
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), GENEROUS)
            assert process.returncode == 0
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/health/ready")).status_code == 200


async def test_a_taken_port_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = await outcome("gateway", "--port", str(port))
    assert (code, len(err.strip().splitlines()), "--port" in err) == (1, 1, True)
    assert err.startswith(f"Error: llmops cannot listen on 127.0.0.1:{port}")


@pytest.mark.parametrize("host", ["300.1.1.1", "192.0.2.1"])
async def test_a_host_of_another_machine_is_one_sentence(host):
    code, _, err = await outcome("gateway", "--host", host)
    said = "; give --host an address of this machine, such as 127.0.0.1, and --port"
    assert (code, len(err.strip().splitlines()), said in err) == (1, 1, True)
    assert err.startswith(f"Error: llmops cannot listen on {host}:9000 (")


async def chat_on(terminal: int, stack: Stack, *arguments: str) -> asyncio.subprocess.Process:
    """Start `llmops chat` in a session of its own on this terminal."""
    command = [*LLMOPS, "chat", "--url", stack.url, *arguments]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    return await asyncio.create_subprocess_exec(*command, **streams, start_new_session=True)


async def test_chat_sends_the_key_the_history_and_the_sampling_flags(stack):
    stack.say("Hello")
    master, slave = pty.openpty()
    chat = await chat_on(slave, stack, *["--system", "S", "--temperature", "0.5", "--max-tokens", "9"])
    os.close(slave)
    for count, text in enumerate((b"one\n", b"two\n"), 1):
        os.write(master, text)
        await eventually(lambda count=count: len(stack.triton.requests) == count)
    sent = stack.triton.requests[-1]
    expected = "<system>S\n<user>one\n<assistant>Hello\n<user>two\n<assistant>"
    assert sent["input_ids"] == stack.tokenizer.encode(expected)
    assert (sent["temperature"], sent["request_output_len"]) == ([0.5], [9])
    os.write(master, b"/quit\n")
    assert await asyncio.wait_for(chat.wait(), GENEROUS) == 0
    os.close(master)


async def test_ctrl_c_stops_the_answer_and_not_the_program(stack):
    async def endless(tensors):
        while True:
            yield Step((5,), wait=0.01)

    stack.triton.script = endless
    master, slave = pty.openpty()
    chat = await chat_on(slave, stack)
    os.close(slave)
    os.write(master, b"go on for ever\n")
    await eventually(lambda: stack.triton.active == 1)
    await asyncio.sleep(0.2)
    chat.send_signal(signal.SIGINT)
    await stack.idle()
    stack.say("Hello")
    os.write(master, b"again\n")
    await eventually(lambda: len(stack.triton.requests) == 2)
    os.write(master, b"/quit\n")
    assert await asyncio.wait_for(chat.wait(), GENEROUS) == 0
    assert "[stopped]" in os.read(master, 100_000).decode()
    os.close(master)
