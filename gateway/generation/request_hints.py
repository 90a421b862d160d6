"""Fields of a body that say how its request is scheduled, placed and recorded.

They are the same in all APIs: `service_tier`, `prompt_cache_key`, and the end user, which is
`safety_identifier`, its predecessor `user`, or Anthropic's `metadata.user_id`. They are read before
the model is chosen, because tiers decide what a saturated model takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.routing.admission.request_queue import DEFAULT_TIER_NAME
from llmops.gateway.routing.admission.slo_headers import FAIRNESS_SCOPE

#: Values of `service_tier` that ask for the key's own tier, in OpenAI's and in Anthropic's API.
OWN_TIER = frozenset({"auto", "default", "standard_only"})
#: Characters of an end user's name that are kept: OpenAI's maximum for `safety_identifier`.
MAX_END_USER_LENGTH = 64


def apply_request_hints(body: object, context: RequestContext, tiers: Sequence[str]) -> bool:
    """Set the tier, the cache key and the end user of a request from its body.

    Args:
        body: The body of any API.
        context: The request, which gets them.
        tiers: The tiers of the settings, the highest first.

    Returns:
        False if `service_tier` changes nothing, because there is no such tier, or because the tier
        is above the key's. The latter adds a warning.
    """
    context.prompt_cache_key = getattr(body, "prompt_cache_key", None) or ""
    end_user = (
        getattr(body, "safety_identifier", None)
        or getattr(body, "user", None)
        or getattr(getattr(body, "metadata", None), "user_id", None)
    )
    if end_user:
        # it is written to the log and the store
        context.end_user = "".join(char if char.isprintable() else "?" for char in end_user[:MAX_END_USER_LENGTH])
        if not context.fairness_id and FAIRNESS_SCOPE in context.caller.scopes:
            context.fairness_id = context.end_user
    wanted = getattr(body, "service_tier", None)
    if wanted is None or wanted in OWN_TIER:
        return True
    if wanted not in tiers:
        return False
    own = context.caller.tier or DEFAULT_TIER_NAME
    # a tier that is not described is served as the default tier, or as the last one
    rank = next((tiers.index(name) for name in (own, DEFAULT_TIER_NAME) if name in tiers), len(tiers) - 1)
    if tiers.index(wanted) < rank:
        context.warnings.append(f"The tier of this key is {tiers[rank]}; service_tier cannot ask for a higher one.")
        return False
    context.service_tier = wanted
    context.caller = replace(context.caller, tier=wanted)
    return True
