"""How far two models are apart on the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class Comparison:
    """Sums over tokens of reference p and candidate q; `add` may be called text by text.

    `perplexity_ratio` is exp(mean NLL of q - mean NLL of p); KL is KL(p || q) in nats per token.
    """

    tokens: int = 0
    nll_reference: float = 0.0
    nll_candidate: float = 0.0
    agreeing: int = 0
    kl_sum: float = 0.0
    kl_worst: float = 0.0

    def add(self, reference: Tensor, candidate: Tensor, targets: Tensor) -> None:
        """Log-probabilities (tokens, vocabulary) and the tokens that really came next, (tokens,)."""
        p, q = reference.float(), candidate.float()
        if not torch.isfinite(q).all():
            self._broken(len(targets))
            return
        kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)
        self.tokens += len(targets)
        self.nll_reference -= float(p.gather(-1, targets[:, None]).sum())
        self.nll_candidate -= float(q.gather(-1, targets[:, None]).sum())
        self.agreeing += int((p.argmax(-1) == q.argmax(-1)).sum())
        self.kl_sum += float(kl.sum())
        self.kl_worst = max(self.kl_worst, float(kl.max()))

    def _broken(self, tokens: int) -> None:
        """NaN or infinity: as bad as can be, and JSON can still hold it."""
        self.tokens += tokens
        self.nll_candidate += 100.0 * tokens
        self.kl_sum += 100.0 * tokens
        self.kl_worst = 100.0

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll_reference / self.tokens))

    @property
    def perplexity_ratio(self) -> float:
        return float(np.exp((self.nll_candidate - self.nll_reference) / self.tokens))

    @property
    def top1_agreement(self) -> float:
        return self.agreeing / self.tokens

    @property
    def mean_kl(self) -> float:
        return self.kl_sum / self.tokens
