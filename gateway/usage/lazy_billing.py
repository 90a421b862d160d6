"""What a gateway with a store has of this room; without one none of it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmops.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from llmops.gateway.usage.billing import Billing


def create_billing(settings: GatewaySettings) -> Billing | None:
    """None where nobody is asked for a key: there is nobody to bill."""
    if settings.store is None or settings.open:
        return None
    from llmops.gateway.usage.billing import Billing

    return Billing(settings.store)
