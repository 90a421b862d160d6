"""The shared state of the checks of an engine model: a client, metadata and reference answers."""

from dataclasses import dataclass, field
from pathlib import Path

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.contract import SUBSCRIPTION
from llmops.errors import InputError
from llmops.gateway.interfaces import ModelMetadata
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.perf.verify.findings import UnseenError, WrongError
from llmops.perf.verify.host import TritonGauges
from llmops.perf.verify.probe import Probe, ProbeResponse

#: Number of tokens of the reference answers: enough for checks that stop an answer in its middle.
PLAIN = 16
_TEXT = "What is the capital of France?"
_LOOP = "one two one two one two one two one"


@dataclass
class EngineContext:
    """The engine model under test.

    Attributes:
        probe: The client.
        metadata: The metadata of the model.
        manifest: The engine's manifest, or None without an engine folder.
        gauges: A reader of Triton's gauges, or None without a metrics page.
        owned: True if Triton was started for these checks, so that it may be drained.
        tokenizer: The model's tokenizer, or None if it cannot be read on this machine.
        prompt: Token ids of the common prompt.
        loop: Token ids of a prompt whose answer repeats itself.
        plain: Tokens of the greedy reference answer to the common prompt.
    """

    probe: Probe
    metadata: ModelMetadata
    manifest: EngineManifest | None = None
    gauges: TritonGauges | None = None
    owned: bool = False
    tokenizer: TextTokenizer | None = None
    prompt: list[int] = field(default_factory=list)
    loop: list[int] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)

    @property
    def ours(self) -> bool:
        return SUBSCRIPTION.name in self.probe.inputs

    async def prepare(self) -> None:
        """Tokenise the prompts, and get the greedy reference answer.

        The reference is the second answer, which finds its prompt in the prefix cache, as all later
        answers do.
        """
        self.tokenizer = _tokenizer(self.metadata)
        self.prompt = self._ids(_TEXT, list(range(10, 22)))
        self.loop = self._ids(_LOOP, [10, 11] * 6)
        await self.probe.ask(self.prompt, PLAIN)
        result = await self.probe.ask(self.prompt, PLAIN)
        self.plain = result.ids
        if not self.plain:
            raise WrongError("the engine answers a plain greedy request with no tokens")

    def _ids(self, text: str, otherwise: list[int]) -> list[int]:
        ids = self.tokenizer.encode(text) if self.tokenizer else otherwise
        return [token for token in ids if token < self.metadata.vocab_size] or otherwise

    async def same(self, new: int = 12, prompt: list[int] | None = None, **tensors: object) -> ProbeResponse:
        """Return a greedy answer of `new` tokens to `prompt`, or else to the common prompt.

        `tensors` are further tensors of the request.
        """
        return await self.probe.ask(self.prompt if prompt is None else prompt, new, **tensors)  # type: ignore[arg-type]

    def place(self) -> int:
        """Return a position in `plain` at which an answer can end, because its token is new there.

        Raises:
            UnseenError: There is no such position.
        """
        for at in range(2, len(self.plain) - 4):
            if self.plain[at] not in self.plain[:at]:
                return at
        raise UnseenError(
            "the model's greedy answer says the same token over and over, so nothing can end it in the middle"
        )

    def room(self, expected: int) -> int:
        """Return `new`, or the smaller number of tokens for which the context has room."""
        return max(1, min(expected, self.metadata.max_seq_len - len(self.prompt) - 1))


def _tokenizer(metadata: ModelMetadata) -> TextTokenizer | None:
    try:
        return TextTokenizer(Path(metadata.tokenizer_dir))
    except InputError:
        return None
