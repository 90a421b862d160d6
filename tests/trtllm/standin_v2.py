"""The stand-in of `tensorrt_llm` with the events of KV cache manager V2, which 1.4 makes the default.

It is a second implementation below the adapter: the rest is the stand-in of 1.3. Facts from
NVIDIA/TensorRT-LLM `tensorrt_llm/runtime/kv_cache_manager_v2/_event_manager.py` at 1c39d359, read
on 2026-11-25:

- every event of a block comes once per group of layers (`add_stored_block_event_from_block`), with
  `layer_group_id` and the group's `window_size`; groups may have the same window
- `created` comes first, once per group (`add_created_event`)
- block hashes are texts in hexadecimal (`_normalize_block_hash`), and depend on salt and adapter
- the parent of a first block is None (`_parent_hash_from_radix_block`)
- consecutive blocks of one group are one event (`_add_stored_event`), also the partly filled last
- a group gives up a block alone, as windows do (`add_removed_life_cycle_event`)
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any, ClassVar

from tests.trtllm import standin


class LLM(standin.LLM):
    """The library as of 1.4. `windows` has the attention window of each group of layers."""

    version = "1.4.0rc1"
    windows: ClassVar[dict[int, int]] = {0: 128, 1: 4096, 2: 4096}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys: set[str] = set()
        for group in self.windows:
            self._add(group, {"type": "created", "num_blocks_per_cache_level": [100]})

    def remove(self, group: int, *keys: str) -> None:
        """Let a group give up blocks."""
        self._add(group, {"type": "removed", "block_hashes": list(keys)})

    def chain(self, prompt: list[int], salt: str | None) -> list[tuple[str, list[int]]]:
        """Return the hash and the tokens of each block of a prompt, the partly filled last included."""
        size, key, found = self.arguments.kv_cache_config.tokens_per_block, str(salt), []
        for start in range(0, len(prompt), size):
            block = list(prompt[start : start + size])
            key = hashlib.sha256(f"{key}{block}".encode()).hexdigest()
            found.append((key, block))
        return found

    def _store(self, prompt: list[int]) -> None:
        chain = self.chain(prompt, self.salts[-1])
        parents = [None, *(key for key, _ in chain)]
        new = [
            (parent, key, block) for parent, (key, block) in zip(parents, chain, strict=False) if key not in self.keys
        ]
        self.keys.update(key for _, key, _ in new)
        blocks = [
            {"block_hash": key, "tokens": [{"token_id": token, "token_extra_id": 0} for token in block]}
            for _, key, block in new
        ]
        for group in self.windows if new else ():
            self._add(group, {"type": "stored", "parent_hash": new[0][0], "blocks": blocks})

    def _add(self, group: int, data: dict[str, Any]) -> None:
        self.events.append(
            {
                "event_id": len(self.events),
                "data": data,
                "window_size": self.windows[group],
                "hash_algo": "v2_sha256",
                "layer_group_id": group,
            }
        )


def api() -> SimpleNamespace:
    """Return the names of the library, as `standin.api` does for earlier releases."""
    return SimpleNamespace(**{**vars(standin.api(LLM.version)), "LLM": LLM})
