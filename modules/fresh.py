"""A small language model made from nothing: a Llama of any size with a character tokenizer. No file, no network."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..data.errors import UsageError

# Standard deviations of the initial weights. transformers' 0.02 is made for widths in the thousands; in a model this
# narrow it leaves attention flat, and sums are not learnt within a few hundred steps.
MATRIX_STD, EMBEDDING_STD = 0.06, 0.5
PAD, END, UNKNOWN = SPECIAL = "<pad>", "<eos>", "<unk>"
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))


@dataclass(frozen=True)
class FreshModel:
    """A Llama with a character tokenizer; the default has 0.4 million parameters.

    Args:
        layers: transformer blocks.
        width: size of the hidden states; the feed-forward layers are 8/3 as wide.
        heads: attention heads; they divide the width into even parts.
        positions: longest sequence, prompt and completion together.
        seed: of the initial weights.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    positions: int = 2048
    seed: int = 0


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character and the newline, so that any template is known; any other character
    becomes `<unk>`. A standard tokenizer: it is saved and loaded as a folder like every other."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    core = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    core.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def fresh_model(options: FreshModel, tokenizer: PreTrainedTokenizerFast, attention: str) -> LlamaForCausalLM:
    """The model in float32 with weights drawn from `options.seed`; the global random state is left as it was."""
    if options.layers < 1 or options.width < 1 or options.heads < 1 or options.width % (2 * options.heads):
        raise UsageError(
            f"model.policy.fresh has layers={options.layers}, width={options.width}, heads={options.heads}: give at "
            "least one layer, and a width that is a multiple of twice the heads"
        )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.width,
        intermediate_size=-(-8 * options.width // 24) * 8,  # 8/3 of the width, rounded up to a multiple of 8
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=options.positions,
        bos_token_id=None,
        eos_token_id=SPECIAL.index(END),
        pad_token_id=SPECIAL.index(PAD),
        initializer_range=MATRIX_STD,
    )
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(options.seed)  # the CPU's only: fork_rng restores no other here
        model = LlamaForCausalLM(config)
        nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_STD)  # type: ignore[arg-type]
        return model
