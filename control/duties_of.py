"""What the leader does, as the settings say."""

from __future__ import annotations

from collections.abc import Sequence

from llmops.control.duties import Duty
from llmops.gateway.settings import GatewaySettings


def duties_of(settings: GatewaySettings) -> Sequence[Duty]:
    return ()
