"""Profiles of TensorRT-LLM release lines.

A profile has the arguments of a release line for the LLM API, and the abilities of the line.

Sources, read 2026-11-22: 1.2.1 as published with its documentation; for 1.3 the tree shortly before
1.3.0rc29. Samplers: NVIDIA/TensorRT-LLM issue #9442 and pull requests #16485 (penalties), #16590
(min_p), #17172, #18232; logit bias: `_torch/pyexecutor/sampler.py`, `_apply_embedding_bias`, which
speculation inside a model does not call; alternatives: `TorchSampler`, without speculation;
log-probs: the `SamplingParams` of both; telemetry: #12384; `cache_salt`, which both take: #7106,
and #13793 for 1.3's KV manager.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llmops.build.quant_formats import removal_reason
from llmops.build.trtllm.image_selection import release_of
from llmops.build.trtllm.llm_args import arguments_for_release, is_one_model
from llmops.errors import InputError

_STATS = "enable_iter_perf_stats"
#: Known release lines -> the exact version whose source was read.
CHECKED = {(1, 2): "1.2.1", (1, 3): "1.3.0rc29"}


@dataclass(frozen=True)
class SamplerSupport:
    """The sampling parameters that the sampler of a release supports.

    Requests with other parameters are rejected, because the library would ignore them.
    """

    min_p: bool = True
    seed: bool = True
    penalties: bool = True
    logit_bias: bool = True
    top_logprobs: bool = True
    prompt_logprobs: bool = True


@dataclass(frozen=True)
class ReleaseProfile:
    """The way in which one release line runs an engine.

    The profile applies to installed versions since `since`.

    `arguments` are the arguments of `tensorrt_llm.LLM`. `wishes` are arguments that are set only if
    the installed version has the field. `sampling` lists the supported sampling parameters.
    `refused` is the reason for which the line cannot run the engine, or empty. `log_probs` is the
    value of `SamplingParams.logprobs` that returns the log-probability of the sampled token. With
    `greedy_only`, the engine samples the most likely token at every temperature.
    """

    since: tuple[int, int]
    arguments: dict[str, Any] = field(default_factory=dict)
    wishes: dict[str, Any] = field(default_factory=dict)
    sampling: SamplerSupport = SamplerSupport()
    log_probs: int = 1
    greedy_only: bool = False
    refused: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        return asdict(self)


def profiles_per_release(arguments: Mapping[str, Any], quant: str = "none") -> list[ReleaseProfile]:
    """Return a profile for each known release line, oldest first.

    `quant` is the engine's format.
    """
    return [_profile(dict(arguments), minor, quant) for minor in CHECKED]


def profile_of_release(arguments: Mapping[str, Any], version: str, quant: str = "none") -> ReleaseProfile:
    """Return the profile of the newest known release line that is not later than `version`.

    Raises:
        InputError: The release cannot run the engine.
    """
    minor = max((one for one in CHECKED if one <= release_of(version)), default=min(CHECKED))
    profile = _profile(dict(arguments), minor, quant)
    if profile.refused:
        raise InputError(profile.refused)
    return profile


def _profile(arguments: dict[str, Any], minor: tuple[int, int], quant: str) -> ReleaseProfile:
    try:
        if gone := removal_reason(quant, minor):
            raise InputError(f"TensorRT-LLM 1.3 loads no {gone} checkpoint; build it again with fp8 or int4_awq.")
        resolved = arguments_for_release(arguments, minor)
    except InputError as error:
        return ReleaseProfile(minor, refused=error.message)
    stats = {} if _STATS in resolved else {_STATS: True}
    if minor >= (1, 3):
        # With "auto", the engine would fill in missing sampling settings from
        # generation_config.json, which is the gateway's task.
        wishes = {"generation_config": "trtllm", **stats}
        speculative = resolved.get("speculative_config") or {}
        # _torch/speculative/mtp_dynamic_tree.py, "greedy only"
        greedy_only = speculative.get("decoding_type") == "MTP" and bool(speculative.get("use_dynamic_tree"))
        sampling = _sampling_1_3(speculative)
        return ReleaseProfile(minor, resolved, wishes, sampling, log_probs=0, greedy_only=greedy_only)
    one_model = is_one_model(resolved.get("speculative_config") or {})
    if one_model:
        # Before 1.3, speculation without allow_advanced_sampling samples the most likely token at
        # every temperature (_torch/speculative/interface.py, _sample_tokens_for_batch), and MTP does
        # so also with it (_torch/pyexecutor/py_executor_creator.py of 1.2; 1.3 has #10019).
        resolved["speculative_config"].setdefault("allow_advanced_sampling", True)
    full_sampler = _has_full_sampler(arguments)
    wishes = {"sampler_type": "TRTLLMSampler"} if full_sampler and "sampler_type" not in resolved else {}
    greedy_only = one_model and (
        resolved["speculative_config"]["decoding_type"] == "MTP"
        or not resolved["speculative_config"].get("allow_advanced_sampling")
    )
    # TRTLLMSampler has only the log-probability of the sampled token, and the other sampler has no
    # penalties.
    plain = not resolved.get("speculative_config")
    sampling = SamplerSupport(
        full_sampler,
        full_sampler,
        full_sampler,
        logit_bias=plain,
        top_logprobs=plain and not full_sampler,
        prompt_logprobs=plain,
    )
    return ReleaseProfile(minor, resolved, {**wishes, **stats}, sampling, greedy_only=greedy_only)


def _has_full_sampler(arguments: Mapping[str, Any]) -> bool:
    """Return True if the arguments select TRTLLMSampler.

    TRTLLMSampler supports min_p, seeds and penalties. The default sampler of 1.2 ignores these
    parameters, and speculation has a sampler of its own.
    """
    chosen = arguments.get("sampler_type", "TRTLLMSampler") == "TRTLLMSampler"
    return chosen and not arguments.get("speculative_config")


def _sampling_1_3(speculative: Mapping[str, Any]) -> SamplerSupport:
    """Return the sampling parameters that 1.3 supports.

    Speculation inside the model refuses min_p, and counts tokens for penalties only if configured,
    and not for a dynamic tree.
    """
    if not speculative:
        return SamplerSupport()
    penalties = bool(speculative.get("enable_penalty")) and not speculative.get("use_dynamic_tree")
    return SamplerSupport(min_p=False, penalties=penalties, logit_bias=False, top_logprobs=False, prompt_logprobs=False)
