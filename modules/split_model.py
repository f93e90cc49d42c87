"""Hidden states and logits of a transformers model as two steps, and the check that they are the model's own."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..data.errors import UsageError
from .attention import Layer

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the largest logit


class SplitModel:
    """The body of a causal language model (`hidden`) and its output layer (`logits`), run apart.

    Between them lie N x T x V numbers that a caller may choose not to make. Known after the output layer: division by
    `logits_scaling` (Granite), multiplication by `logit_scale` (Cohere) or `lm_head_multiplier` (Falcon-H1), and
    soft-capping by `final_logit_softcapping` (Gemma).

    layers: what each layer says of its attention; lean: whether `lean_pass` and `LeanDecoder` were found to give the
    model's own numbers (`shared_prompts` finds out).
    """

    def __init__(self, model: Any, name: str) -> None:
        self.lean = False
        self.layers: dict[int, Layer] = {}
        if model.base_model is model or model.get_output_embeddings() is None:
            raise UsageError(
                f"model.policy.model is '{name}' ({type(model).__name__}), which has no separate output layer: this "
                "kind of model is not supported; give another one"
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

    def logits(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """(..., V) logits as the model's own forward pass gives them, but in fp32 at least: those of a 16-bit model are
        not rounded.

        Args:
            weight: what `fp32_head` gave, so that it is made but once for many calls.
        """
        head = self.model.get_output_embeddings()
        dtype = multiplied_in(hidden)
        if type(head) is nn.Linear and dtype.itemsize == 2:
            with torch.autocast(hidden.device.type, enabled=False):
                weight = head.weight.float() if weight is None else weight
                logits = _UnroundedLinear.apply(hidden.to(dtype).float(), weight, dtype)
                logits = logits if head.bias is None else logits + head.bias.float()
        else:
            logits = head(hidden)
            logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.scale != 1:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits

    def fp32_head(self) -> Tensor | None:
        """The output layer's weights for `logits`, as long as they do not change; None where it takes its own."""
        head = self.model.get_output_embeddings()
        return head.weight.detach().float() if type(head) is nn.Linear and head.weight.dtype.itemsize == 2 else None

    @torch.no_grad()
    def check_against_own_forward(self, pad_token_id: int, name: str) -> None:
        """Raise a UsageError unless hidden states and head, with the row padded on the left, give the logits of the
        model's own forward pass without padding."""
        weight = self.model.get_input_embeddings().weight
        ids = torch.arange(5, device=weight.device)[None] * 7919 % weight.shape[0]  # any few tokens
        padded = torch.cat([ids.new_full((1, 3), pad_token_id), ids], dim=1)
        mask = torch.arange(8, device=weight.device)[None] >= 3
        self.model.eval()
        own = self.model(input_ids=ids, use_cache=False).logits[0].float()
        ours = self.logits(self.hidden(mask, input_ids=padded)[0, 3:]).float()
        gap, size = float((ours - own).abs().max()), float(own.abs().max())
        if not gap <= TOLERANCE[weight.dtype] * size:
            raise UsageError(
                f"model.policy.model is '{name}' ({type(self.model).__name__}), whose logits are off by {gap:.2g} (of "
                f"{size:.2g}) when padded on the left or split into hidden states and head: this kind of model is not "
                "supported; give another one"
            )


def multiplied_in(hidden: Tensor) -> torch.dtype:
    """In which a linear layer multiplies."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def exact_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that autocast, which may still be on, leaves alone."""

    @wraps(backward)
    def exact(ctx: Any, *above: Tensor) -> Any:
        with torch.autocast(above[0].device.type, enabled=False):
            return backward(ctx, *above)

    return once_differentiable(exact)


class _UnroundedLinear(torch.autograd.Function):
    """Products of 16-bit numbers, added up and kept in fp32.

    hidden (..., d) and weight (V, d) are fp32 tensors that the hardware may round to `dtype`, which changes nothing
    where they come from it; autocast rounds fp32 weights to it likewise, and so are gradients of the logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.dtype = dtype
        with _fast_products(dtype):
            return hidden @ weight.T

    @staticmethod
    @exact_backward
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        with _fast_products(ctx.dtype):
            to_hidden = above @ weight if ctx.needs_input_grad[0] else None
            to_weight = above.flatten(0, -2).T @ hidden.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return to_hidden, to_weight, None


@contextmanager
def _fast_products(dtype: torch.dtype) -> Iterator[None]:
    """fp32 matrices are multiplied by units for short numbers: exactly, if their numbers are of `dtype`."""
    units = [(torch.backends.cuda.matmul, "tf32")]
    if dtype == torch.bfloat16:
        units.append((torch.backends.mkldnn.matmul, "bf16"))  # type: ignore[attr-defined]
    before = [unit.fp32_precision for unit, _ in units]
    try:
        for unit, precision in units:
            unit.fp32_precision = precision
        yield
    finally:
        for (unit, _), precision in zip(units, before, strict=True):
            unit.fp32_precision = precision
