"""Much of one thing: each place of a body where a client can put more than anybody needs."""

import json
import random
from collections.abc import Callable, Iterator

from tests.faults.fuzz.base import Case, Target

LARGEST = 17 * 2**20
# the gateway holds only so many bytes, and only so many prompts may wait to be tokenised
_FULL = frozenset({503, 529})

_ITEMS = (
    b"1", b"0.5", b'""', b'"x"', b"null", b"[]", b"{}", b"[[]]", b"-1", b"99999999999999999999", b'{"a":1}',
    b'{"role":"user"}', b'{"role":"user","content":"x"}', b'{"type":"text","text":"x"}',
    b'{"type":"function","function":{"name":"f"}}',
)  # fmt: skip
_TEXTS = (
    b"7", b" ", b"a ", b"\\n", b"\\u00e9", b"\\ud83d\\ude42", "é".encode(), "🙂".encode(), b"=", b"{[,:", b"NaN",
    b"1e999",
)  # fmt: skip
# the places that take a list, and those that take a text
_LISTS: tuple[tuple[str, str], ...] = (
    ("/v1/chat/completions", '{"model":%m,"messages":[%x]}'),
    ("/v1/chat/completions", '{"model":%m,"messages":[{"role":"user","content":[%x]}]}'),
    ("/v1/chat/completions", '{"model":%m,%u,"tools":[%x]}'),
    ("/v1/chat/completions", '{"model":%m,%u,"stop":[%x]}'),
    ("/v1/chat/completions", '{"model":%m,%u,"stop_token_ids":[%x]}'),
    ("/v1/chat/completions", '{"model":%m,%u,"bad_words":[%x]}'),
    ("/v1/chat/completions", '{"model":%m,%u,"guided_choice":[%x]}'),
    ("/v1/chat/completions", '{"model":%m,%u,"metadata":{"a":[%x]}}'),
    ("/v1/chat/completions", '{"model":%m,%u,"documents":[%x]}'),
    ("/v1/chat/completions", '{"model":%m,"messages":[{"role":"assistant","content":"","tool_calls":[%x]}]}'),
    ("/v1/completions", '{"model":%m,"max_tokens":1,"prompt":[%x]}'),
    ("/v1/completions", '{"model":%m,"max_tokens":1,"prompt":[[%x]]}'),
    ("/v1/responses", '{"model":%m,"store":false,"input":[%x]}'),
    ("/v1/responses", '{"model":%m,"store":false,"input":"x","include":[%x]}'),
    ("/v1/messages", '{"model":%m,"max_tokens":1,"messages":[%x]}'),
    ("/v1/messages", '{"model":%m,"max_tokens":1,"messages":[{"role":"user","content":[%x]}]}'),
    ("/v1/messages", '{"model":%m,%u,"tools":[%x]}'),
    ("/v1/messages", '{"model":%m,%u,"stop_sequences":[%x]}'),
    ("/v1/messages", '{"model":%m,%u,"system":[%x]}'),
    (
        "/v1/messages/count_tokens",
        '{"model":%m,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"c",'
        '"name":"f","input":{"a":[%x]}}]},{"role":"user","content":"x"}]}',
    ),
    ("/v1/embeddings", '{"model":%e,"input":[%x]}'),
    ("/v1/embeddings", '{"model":%e,"input":[[%x]]}'),
    ("/v1/rerank", '{"model":%e,"query":"a","documents":[%x]}'),
    ("/detokenize", '{"model":%m,"tokens":[%x]}'),
)
_PLACES: tuple[tuple[str, str], ...] = (
    ("/v1/chat/completions", '{"model":%m,"max_tokens":1,"messages":[{"role":"user","content":"%x"}]}'),
    ("/v1/chat/completions", '{"model":%m,%u,"user":"%x"}'),
    ("/v1/chat/completions", '{"model":"%x",%u}'),
    ("/v1/chat/completions", '{"model":%m,%u,"stop":"%x"}'),
    ("/v1/chat/completions", '{"model":%m,%u,"chat_template_kwargs":{"a":"%x"}}'),
    ("/v1/chat/completions", '{"model":%m,"messages":[{"role":"user","content":""},{"role":"assistant","content":"",'
     '"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"%x"}}]}]}'),
    ("/v1/completions", '{"model":%m,"max_tokens":1,"prompt":"%x"}'),
    ("/v1/responses", '{"model":%m,"store":false,"input":"x","max_output_tokens":1,"instructions":"%x"}'),
    ("/v1/responses", '{"model":%m,"store":false,"input":"x","max_output_tokens":1,"metadata":{"a":"%x"}}'),
    ("/v1/messages", '{"model":%m,"max_tokens":1,"messages":[{"role":"user","content":"%x"}]}'),
    ("/v1/messages", '{"model":%m,%u,"metadata":{"user_id":"%x"}}'),
    ("/v1/messages/count_tokens", '{"model":%m,"messages":[{"role":"user","content":"x"}],"system":"%x"}'),
    ("/v1/embeddings", '{"model":%e,"input":"%x"}'),
    ("/v1/rerank", '{"model":%e,"query":"a","documents":["%x"]}'),
    ("/v1/rerank", '{"model":%e,"query":"%x","documents":["a"]}'),
    ("/tokenize", '{"model":%m,"prompt":"%x","return_token_strs":true}'),
)  # fmt: skip
_USER = '"max_tokens":1,"messages":[{"role":"user","content":"x"}]'


def cases(target: Target, chance: random.Random) -> Iterator[Case]:
    """Endless; one in ten is megabytes long."""
    kinds: tuple[Callable[[Target, random.Random], Case], ...] = (_list, _text, _keys, _depth)
    while True:
        yield chance.choices(kinds, (5, 4, 2, 1))[0](target, chance)


def _size(chance: random.Random) -> int:
    return int(min(10 ** chance.uniform(2, 5.5 if chance.random() < 0.9 else 7.3), LARGEST))


def _list(target: Target, chance: random.Random) -> Case:
    item = chance.choice(_ITEMS)
    items = [item] * (_size(chance) // (len(item) + 1) + 1)
    items[-1] = chance.choice(_ITEMS)
    return _case(target, chance.choice(_LISTS), b",".join(items))


def _text(target: Target, chance: random.Random) -> Case:
    unit = chance.choice(_TEXTS)
    return _case(target, chance.choice(_PLACES), unit * (_size(chance) // len(unit) + 1))


def _keys(target: Target, chance: random.Random) -> Case:
    value = chance.choice(_ITEMS)
    pairs = b",".join(b'"%d":%b' % (at, value) for at in range(_size(chance) // (len(value) + 10) + 1))
    place = chance.choice(('%u,"logit_bias":{%x}', "%u,%x", '%u,"metadata":{%x}', '%u,"stream_options":{%x}'))
    return _case(target, ("/v1/chat/completions", '{"model":%m,' + place + "}"), pairs)


def _depth(target: Target, chance: random.Random) -> Case:
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    depth = _size(chance) // len(opening) + 1
    return _case(target, chance.choice(_LISTS), opening * depth + (closing * depth if chance.random() < 0.5 else b""))


def _case(target: Target, place: tuple[str, str], filling: bytes) -> Case:
    path, text = place
    text = text.replace("%m", json.dumps(target.model)).replace("%e", json.dumps(target.embedding_model))
    return Case(path, text.replace("%u", _USER).encode().replace(b"%x", filling), refusals=_FULL)
