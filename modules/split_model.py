"""Hidden states and logits of a transformers model as two steps, and the check that they are the model's own."""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.errors import UsageError

if TYPE_CHECKING:
    from .policy import Policy

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the largest logit


class SplitModel:
    """The body of a causal language model (`hidden`) and its output layer (`logits`), run apart.

    Between them lie N x T x V numbers that a caller may choose not to make. Known after the output layer: division by
    `logits_scaling` (Granite), multiplication by `logit_scale` (Cohere) or `lm_head_multiplier` (Falcon-H1), and
    soft-capping by `final_logit_softcapping` (Gemma).
    """

    def __init__(self, model: Any, name: str) -> None:
        if model.base_model is model or model.get_output_embeddings() is None:
            raise UsageError(
                f"policy.model is '{name}' ({type(model).__name__}), which has no separate output layer: this kind of "
                "model is not supported; give another one"
            )
        self.model = model
        self.has_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
        config = model.config.get_text_config()
        self.soft_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.scale = (
            (getattr(config, "logit_scale", None) or 1.0)
            * (getattr(config, "lm_head_multiplier", None) or 1.0)
            / (getattr(config, "logits_scaling", None) or 1.0)
        )

    def hidden(self, mask: Tensor, **inputs: Tensor) -> Tensor:
        """(B, L, d) final hidden states of a batch whose attended tokens `mask` (B, L) marks."""
        if self.has_positions:  # else the model counts the mask itself
            inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
        return self.model.base_model(**inputs, attention_mask=mask.long(), use_cache=False).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) logits, as the model's own forward pass gives them."""
        logits = self.model.get_output_embeddings()(hidden)
        if self.scale != 1:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


def check_against_own_forward(policy: "Policy", name: str) -> None:
    """Raise a UsageError unless hidden states and head, with the row padded on the left, give the logits of the model's
    own forward pass without padding."""
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(5, device=policy.device)[None] * 7919 % vocabulary  # any few tokens
    padded = torch.cat([ids.new_full((1, 3), policy.pad_token_id), ids], dim=1)
    mask = torch.arange(8, device=policy.device)[None] >= 3
    with policy.inference():
        own = policy.model(input_ids=ids, use_cache=False).logits[0].float()
        ours = policy.split.logits(policy.split.hidden(mask, input_ids=padded)[0, 3:]).float()
    dtype = next(policy.parameters()).dtype
    gap, size = float((ours - own).abs().max()), float(own.abs().max())
    if not gap <= TOLERANCE[dtype] * size:
        raise UsageError(
            f"policy.model is '{name}' ({type(policy.model).__name__}), whose logits are off by {gap:.2g} (of "
            f"{size:.2g}) when padded on the left or split into hidden states and head: this kind of model is not "
            "supported; give another one"
        )
