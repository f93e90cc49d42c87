"""The policy: a causal language model with its tokenizer, and how its distribution over completions is scored.

How a model is found and loaded is in loading.py; how completions are sampled, in samplers/.
"""

import copy
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..data.batch import RolloutBatch
from ..data.configurable import Configurable
from ..data.errors import UsageError, nearest
from ..data.sampler import Limits, Purpose
from .fresh import FreshModel
from .loading import DType, load
from .log_probs import token_statistics
from .packed import Packed
from .sharding import gathered
from .shared_prompts import packed_hidden, why_not_shared
from .split_model import SplitModel
from .text import ChatTemplate, TextCodec

log = logging.getLogger(__name__)

Layout = Literal["packed", "padded"]


@dataclass
class Scores:
    """What `Policy.score` gives, (N, T) each and exactly 0 outside the completions; fp32 unless the weights are fp64.

    logp: log-probabilities of the completion's own tokens, at the policy's temperature.
    entropy: of the distribution that each token was drawn from, in nats.
    sum_sq_probs: sum over the vocabulary of its squared probabilities; carries no gradient.
    """

    logp: Tensor
    entropy: Tensor | None = None
    sum_sq_probs: Tensor | None = None


class Policy(Configurable, nn.Module):
    """A causal language model that completes prompts.

    Its distribution is softmax(logits / temperature), for the sampler and for scoring alike. Dropout is off, whatever
    the mode. A model whose logits this class cannot reproduce exactly (checked once, on a few tokens, at the start) is
    refused.

    Args:
        model: "fresh" (a small new model with a character tokenizer), a hub name, a local folder, or "package:NAME"
            for the folder of an installed Python package.
        gguf_file: name of a GGUF file in that place, for models that come as one.
        fresh: size and seed of a fresh model; two layers of width 128 unless given.
        dtype: of the weights: float32, bfloat16, float64, or auto (as they were saved).
        attention: attention implementation of transformers: sdpa, eager, flash_attention_2, ...
        gradient_checkpointing: recompute activations in the backward pass: less memory, more time.
        scoring: "packed": a prompt is run once for all its completions, without padding; "padded": each completion in
            a row of its own behind its prompt. The numbers are the same. A model whose attention cannot be packed
            exactly (checked once, at the start) is scored padded, and a warning says so.
        temperature: divides the logits; above 0. Greedy decoding is an option of validation, not of the policy.
        top_k: sample from the k most probable tokens; 0 = off. For validation and prediction: training refuses it.
        top_p: sample from the most probable tokens that make up this probability; 1 = off. Training refuses it too.
        end_tokens: tokens that end a completion; the tokenizer's and the generation configuration's unless given.
        max_prompt_tokens: longer prompts are skipped; none = as long as the model's positions allow.
        max_completion_tokens: completions are cut there and marked as truncated.
        chat_template: whether a plain prompt becomes a user's chat message: "auto" if the tokenizer has a template,
            "always", or "never".
        trust_remote_code: run Python code that comes with a hub model.
    """

    def __init__(
        self,
        model: str = "fresh",
        gguf_file: str | None = None,
        fresh: FreshModel | None = None,
        dtype: DType = "float32",
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        scoring: Layout = "packed",
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        end_tokens: list[str] | None = None,
        max_prompt_tokens: int | None = None,
        max_completion_tokens: int = 256,
        chat_template: ChatTemplate = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        check_distribution(temperature, top_k, top_p)
        if model != "fresh" and fresh is not None:
            raise UsageError(
                f"model.policy.fresh was given, but model.policy.model is '{model}': it is for model 'fresh' only"
            )
        if scoring not in get_args(Layout):
            raise UsageError(f"model.policy.scoring is '{scoring}': {nearest(scoring, get_args(Layout))}")
        self.model, self.tokenizer = load(model, gguf_file, fresh or FreshModel(), dtype, attention, trust_remote_code)
        self.text = TextCodec(
            self.tokenizer, end_tokens, self.model.generation_config.eos_token_id, chat_template, model
        )
        self.end_token_ids = self.text.end_token_ids
        self.pad_token_id = self.text.pad_token_id
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.max_prompt_tokens, self.max_completion_tokens = within_positions(
            self.model.config.get_text_config(), max_prompt_tokens, max_completion_tokens
        )
        self.gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            recompute_activations(self.model, model)
        self.version = 0
        self.split = SplitModel(self.model, model)
        self.split.check_against_own_forward(self.pad_token_id, model)
        reason = why_not_shared(self.split)
        self.shares_prompts = reason is None
        self.scoring: Layout = "packed" if scoring == "packed" and self.shares_prompts else "padded"
        if not self.shares_prompts:
            log.warning(
                "'%s' (%s) cannot share a prompt between its completions (%s): it is sampled by transformers' generate "
                "and scored padded, more slowly",
                model,
                type(self.model).__name__,
                reason,
            )
        self.train()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _apply(self, fn: Any, recurse: bool = True) -> "Policy":
        """Conversions (to a device, to a dtype) leave buffers as exact as they are: a rotary frequency in bfloat16 puts
        a token some hundred positions in at the wrong place."""
        exact = dict(self.model.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point() and buffer.dtype.itemsize < exact[name].dtype.itemsize:
                owner, _, own_name = name.rpartition(".")
                setattr(self.model.get_submodule(owner), own_name, exact[name].to(buffer.device))
        return self

    # ---- text ----------------------------------------------------------------------------------------------------

    def encode_prompt(self, prompt: str | list[dict[str, str]]) -> list[int]:
        """Token ids of a prompt, ready for a completion to follow. See `TextCodec.encode_prompt`."""
        return self.text.encode_prompt(prompt)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text as it is: no chat template, no special tokens."""
        return self.text.encode_text(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, end and pad tokens left out."""
        return self.text.decode(ids)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """One readable string a token, special tokens included."""
        return self.text.token_strings(ids)

    def token_char_ends(self, ids: Sequence[int]) -> list[int]:
        """For each token, the length of the text up to and including it; never falls."""
        return self.text.token_char_ends(ids)

    # ---- sampling ------------------------------------------------------------------------------------------------

    def limits(self, purpose: Purpose) -> Limits:
        """What to sample for a purpose; the same for every one (validation sets its own temperature)."""
        return Limits(self.max_completion_tokens, self.temperature, self.top_k, self.top_p)

    def check_trainable_distribution(self) -> None:
        """Raise a UsageError if the sampler would draw from another distribution than `score` scores."""
        for name, value, off in (("top_k", self.top_k, 0), ("top_p", self.top_p, 1.0)):
            if value != off:
                raise UsageError(
                    f"model.policy.{name} is {value}, but training scores the whole distribution and would be "
                    f"off-policy: set model.policy.{name} to {off}, or lower model.policy.temperature instead"
                )

    @contextmanager
    def inference(self) -> Iterator["Policy"]:
        """For every use outside the update: evaluation mode, no gradient, and weights that are whole on every process;
        modes are put back as they were."""
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            with gathered(self), torch.no_grad():
                yield self
        finally:
            for module in training:
                module.training = True

    @contextmanager
    def full_precision(self) -> Iterator["Policy"]:
        """With fp32 weights in place of 16-bit ones, and without autocast, for numbers that 16 bits would drown. The
        16-bit weights are kept beside them and are put back."""
        halves = [(p, p.data) for p in self.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
        try:
            for parameter, data in halves:
                parameter.data = data.float()
            with torch.autocast(self.device.type, enabled=False):
                yield self
        finally:
            for parameter, data in halves:
                parameter.data = data

    # ---- scoring -------------------------------------------------------------------------------------------------

    def embed(self, rollouts: RolloutBatch) -> Tensor:
        """(N, Lp + T, d): the input embeddings of prompts and completions, as `hidden` takes them."""
        return self.model.get_input_embeddings()(self._row_ids(rollouts))

    def hidden(self, rollouts: RolloutBatch, layout: Layout = "padded", embeddings: Tensor | None = None) -> Tensor:
        """(N, T, d): the final hidden states; position t is the one that predicts the completion's token t.

        Positions count attended tokens only, so padding changes nothing.

        Args:
            layout: "padded": every completion in a row of its own, behind its left-padded prompt. "packed": all in one
                row, each prompt once; then what a prompt's tokens get as gradient is the sum over its completions.
            embeddings: (N, Lp + T, d) used in place of the tokens' own, from `embed`; padded layout only.
        """
        if layout == "packed":
            if embeddings is not None:
                raise ValueError("embeddings go with the padded layout")
            return packed_hidden(self.split, Packed(rollouts), self.gradient_checkpointing and self.model.training)
        mask = torch.cat([rollouts.prompt_mask[rollouts.prompt_index], rollouts.completion_mask], dim=1)
        inputs = {"input_ids": self._row_ids(rollouts)} if embeddings is None else {"inputs_embeds": embeddings}
        prompt, completion = rollouts.prompt_ids.shape[1], rollouts.completion_ids.shape[1]
        return self.split.hidden(mask, **inputs)[:, prompt - 1 : prompt + completion - 1]

    def head(self, hidden: Tensor, temperature: float | None = None) -> Tensor:
        """(..., V): logits / temperature of hidden states (..., d), in fp32 (fp64 stays fp64).

        Args:
            temperature: the policy's own unless given.
        """
        logits = self.split.logits(hidden)
        temperature = self.temperature if temperature is None else temperature
        return logits if temperature == 1 else logits / temperature

    def score(
        self,
        rollouts: RolloutBatch,
        entropy: bool = False,
        sum_sq_probs: bool = False,
        temperature: float | None = None,
    ) -> Scores:
        """Log-probabilities of all completions, and entropy and sum of squared probabilities where asked for.

        The gradient flows through `logp` and `entropy`. Logits are made for the completions' own tokens only. The
        truncation of top-k and top-p is not applied: `check_trainable_distribution` refuses it for training.

        Args:
            temperature: the policy's own unless given.
        """
        mask = rollouts.completion_mask
        logp, entropies, squares = token_statistics(
            self.hidden(rollouts, self.scoring)[mask],
            rollouts.completion_ids[mask],
            lambda hidden: self.head(hidden, temperature),
            entropy,
            sum_sq_probs,
        )
        return Scores(
            _spread(logp, mask),
            None if entropies is None else _spread(entropies, mask),
            None if squares is None else _spread(squares, mask),
        )

    def micro_batches(self, rollouts: RolloutBatch, tokens: int) -> Iterator[Tensor]:
        """Runs of rows that `score` takes as at most so many tokens; see `RolloutBatch.rows_by_token_budget`."""
        return rollouts.rows_by_token_budget(tokens, shared_prompts=self.scoring == "packed")

    def _row_ids(self, rollouts: RolloutBatch) -> Tensor:
        """(N, Lp + T) token ids: each completion behind its prompt."""
        return torch.cat([rollouts.prompt_ids[rollouts.prompt_index], rollouts.completion_ids], dim=1)

    # ---- copies and identity -------------------------------------------------------------------------------------

    def frozen_copy(self) -> "Policy":
        """The same policy with weights of its own that never change: the reference of a KL penalty."""
        frozen = copy.deepcopy(self, {id(self.tokenizer): self.tokenizer, id(self.text): self.text})
        return frozen.requires_grad_(False).eval()

    def content_hash(self) -> str:
        """Of architecture, tokenizer and weights: equal for policies that are equal, wherever they came from."""
        digest = hashlib.sha256()
        config = self.model.config.to_dict()
        for key in ("transformers_version", "_name_or_path", "dtype", "torch_dtype"):
            config.pop(key, None)
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        digest.update(json.dumps([self.end_token_ids, self.tokenizer.get_vocab()], sort_keys=True).encode())
        for name, weight in self.model.state_dict().items():
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def recompute_activations(model: Any, name: str) -> None:
    """Gradient checkpointing in training mode."""
    if not model.supports_gradient_checkpointing:
        raise UsageError(
            f"model.policy.gradient_checkpointing is true, but '{name}' ({type(model).__name__}) cannot do it"
        )
    older_name = "gradient_checkpointing_enable"
    getattr(model, "activation_checkpointing_enable", getattr(model, older_name))({"use_reentrant": False})
    model.disable_input_require_grads()  # only reentrant checkpointing needs them


def check_distribution(temperature: float, top_k: int, top_p: float) -> None:
    if not temperature > 0:
        raise UsageError(
            f"model.policy.temperature is {temperature}: give a number above 0 (for greedy decoding in validation set "
            "data.validation.temperature to 0)"
        )
    if top_k < 0:
        raise UsageError(f"model.policy.top_k is {top_k}: give 0 (off) or more")
    if not 0 < top_p <= 1:
        raise UsageError(f"model.policy.top_p is {top_p}: give a number above 0 and at most 1 (off)")


def within_positions(config: Any, prompt: int | None, completion: int) -> tuple[int | None, int]:
    """The longest prompt and completion, the prompt's bounded by the model's positions unless given."""
    if completion < 1 or (prompt is not None and prompt < 1):
        name, value = ("completion", completion) if completion < 1 else ("prompt", prompt)
        raise UsageError(f"model.policy.max_{name}_tokens is {value}: give a whole number of at least 1")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return prompt, completion
    longest = positions - completion
    if longest < (prompt or 1):
        raise UsageError(
            f"model.policy.max_prompt_tokens ({prompt}) and model.policy.max_completion_tokens ({completion}) are "
            f"together more than the model's {positions} positions: lower one of them"
        )
    return prompt or longest, completion


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """(M,) values put where the (N, T) mask is True, 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
