"""Attack: an answer with another owner's id, in the Redis where gateways share running answers."""

from __future__ import annotations

import asyncio

from tests.attacks.harness import record
from tests.gateway.test_resumed_streams import gateways, patient_with_valkey, told, valkey
from tests.support.resuming_reader import ResumingReader

__all__ = ["gateways", "patient_with_valkey", "told", "valkey"]


async def test_answers_of_two_owners_with_one_id(gateways, told):
    """The id of a continued answer is that of its message, which a client may choose."""
    one, other = gateways
    told.wait = 0.03
    victim = ResumingReader("Where is it?")
    await victim.read(one, 2)
    theirs = {"authorization": "Bearer attacker"}
    message = {
        "type": "message",
        "role": "assistant",
        "id": f"msg_{victim.run.removeprefix('chatcmpl-')}",
        "content": "A",
    }
    items = [{"type": "message", "role": "user", "content": "Mine"}, message]
    conversation = (await one.post("/v1/conversations", json={"items": items}, headers=theirs)).json()["id"]
    body = {"model": "tiny", "messages": [], "continue_final_message": True, "conversation_id": conversation}
    taken = asyncio.create_task(one.post("/api/chat/completions", json={**body, "stream": False}, headers=theirs))
    await asyncio.sleep(0.3)
    stopped = await other.delete(f"/api/chat/completions/{victim.run}", headers=theirs)
    assert (await taken).json()["id"] == victim.run
    again = ResumingReader("Where is it?")
    again.run = victim.run
    await asyncio.gather(victim.whole(one), again.whole(other))
    record(f"the attacker stopped {stopped.json().get('id')}, the victim read {len(again.text)} characters elsewhere")
    assert victim.text == again.text == told.text("Where is it?")
