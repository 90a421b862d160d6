"""The kinds of models: how a model is recognised on a server, and how its metadata is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic

from llmops.contract import EMBEDDING_SUFFIX, ENGINE_SUFFIX, SCORE_SUFFIX
from llmops.errors import LlmopsError
from llmops.gateway.interfaces import ModelMetadata
from llmops.gateway.routing.served_models import CrossEncoder, E, EmbeddingModel, GenerativeModel, M
from llmops.gateway.settings import GatewaySettings, ModelOverrides
from llmops.gateway.text.chat_template import ChatTemplate
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.gateway.triton.encoder_client import TritonEncoder
from llmops.gateway.triton.grpc_client import TritonClient
from llmops.gateway.triton.model_metadata import EncoderMetadata, parse_encoder_metadata, parse_model_metadata
from llmops.gateway.triton.request_stream import RequestStreamTransport
from llmops.gateway.triton.step_stream import StepStreamTransport
from llmops.tokenizer_files import is_panic


class ModelLoadError(LlmopsError):
    """An error in a part of a model.

    Attributes:
        fault: A sentence that names the part. The message of the error adds the reason.
    """

    def __init__(self, fault: str, why: BaseException) -> None:
        super().__init__(f"{fault}: {str(why) or repr(why)}")
        self.fault = fault


class ModelKind(ABC, Generic[M]):
    """A kind of models.

    Attributes:
        suffix: The end of the name in Triton of each model of this kind.
        model: The class of the models.
    """

    suffix: str
    model: type[M]

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings

    def served(self, triton_names: Iterable[str]) -> Mapping[str, str]:
        """Return the models of this kind among Triton's models, each with its served name."""
        return {one: one.removesuffix(self.suffix) for one in triton_names if one.endswith(self.suffix)}

    @abstractmethod
    def read_card(self, text: str, name: str) -> Any:
        """Parse the metadata of a model. Raises InputError if the metadata is invalid."""

    @abstractmethod
    def make(self, card: Any, triton: TritonClient, triton_name: str) -> M:
        """Create a model. Reads files and therefore runs in a thread.

        Raises:
            ModelLoadError: A part of the model cannot be used.
        """

    def _overrides(self, name: str) -> ModelOverrides:
        return self._settings.models.get(name, ModelOverrides())


class GenerativeKind(ModelKind[GenerativeModel]):
    """The kind of models that generate tokens.

    `models.NAME.engine_model` in the settings can name further models of this kind.
    """

    suffix, model = ENGINE_SUFFIX, GenerativeModel

    def served(self, triton_names: Iterable[str]) -> Mapping[str, str]:
        named = {over.engine_model: name for name, over in self._settings.models.items() if over.engine_model}
        return {**super().served(triton_names), **named}

    def read_card(self, text: str, name: str) -> ModelMetadata:
        return parse_model_metadata(text, {"name": name, **self._overrides(name).metadata_fields()})

    def make(self, card: ModelMetadata, triton: TritonClient, triton_name: str) -> GenerativeModel:
        tokenizer = _load_tokenizer(card.tokenizer_dir)
        with _loading_part("its chat template cannot be used"):
            template = self._template(tokenizer, card.name)
        transport = StepStreamTransport if StepStreamTransport.name in card.transports else RequestStreamTransport
        return GenerativeModel(card.name, card, tokenizer, template, transport(triton.start_call, triton_name, card))

    def _template(self, tokenizer: TextTokenizer, name: str) -> ChatTemplate | None:
        if tokenizer.chat_template is None:
            return None
        meant = self._overrides(name).control_tokens_in_messages
        return ChatTemplate(
            tokenizer.chat_template,
            tokenizer.special_tokens,
            seconds=self._settings.limits.template_time,
            controls=None if meant else tokenizer.keep_controls_apart(),
        )


class EncoderKind(ModelKind[E]):
    """The base class of the kinds of encoders."""

    def read_card(self, text: str, name: str) -> EncoderMetadata:
        return parse_encoder_metadata(text, {"name": name, **self._overrides(name).metadata_fields()})

    def make(self, card: EncoderMetadata, triton: TritonClient, triton_name: str) -> E:
        encoder = TritonEncoder(triton.infer, triton_name, card, self._settings.limits.queued_inputs)
        return self.model(card.name, card, _load_tokenizer(card.tokenizer_dir), encoder)


class EmbeddingKind(EncoderKind[EmbeddingModel]):
    """The kind of encoders that return vectors."""

    suffix, model = EMBEDDING_SUFFIX, EmbeddingModel


class CrossEncoderKind(EncoderKind[CrossEncoder]):
    """The kind of encoders that score pairs of texts."""

    suffix, model = SCORE_SUFFIX, CrossEncoder


class SingleModelKind(ModelKind[M]):
    """A kind restricted to the model `triton_name`.

    The model is served as `name` or, if `name` is empty, under its Triton name.
    """

    def __init__(self, kind: ModelKind[M], triton_name: str, name: str) -> None:
        self.suffix, self.model = kind.suffix, kind.model
        self._kind, self._triton_name, self._name = kind, triton_name, name

    def served(self, triton_names: Iterable[str]) -> Mapping[str, str]:
        found = self._kind.served(triton_names)
        return {one: self._name or name for one, name in found.items() if one == self._triton_name}

    def read_card(self, text: str, name: str) -> Any:
        return self._kind.read_card(text, name)

    def make(self, card: Any, triton: TritonClient, triton_name: str) -> M:
        return self._kind.make(card, triton, triton_name)


def create_model_kinds(settings: GatewaySettings) -> list[ModelKind[Any]]:
    """Return all kinds, in the order of their models in GET /v1/models."""
    return [GenerativeKind(settings), EmbeddingKind(settings), CrossEncoderKind(settings)]


def _load_tokenizer(directory: str) -> TextTokenizer:
    with _loading_part("its tokenizer cannot be read"):
        return TextTokenizer(Path(directory))


@contextmanager
def _loading_part(fault: str) -> Iterator[None]:
    """Turn any exception, and a panic of the tokenizers' library, into ModelLoadError.

    The exception's text may name files, so clients get only `fault`.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelLoadError(fault, error) from error
