"""Between text and token ids: prompts, chat templates, end tokens, and which characters a token stands for."""

from collections.abc import Sequence
from typing import Any, Literal

from ..data.errors import UsageError

ChatTemplate = Literal["auto", "always", "never"]
UNFINISHED = "\ufffd"  # what a tokenizer decodes the first bytes of a character to


class TextCodec:
    """A tokenizer with the decisions that a policy needs made once: template, start token, end tokens, padding.

    Args:
        end_tokens: tokens that end a completion; None = the tokenizer's own and `generation_ends`.
        generation_ends: what the model's generation configuration names as its end token or tokens.
        name: the model's name, for errors.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_tokens: list[str] | None,
        generation_ends: int | list[int] | None,
        chat_template: ChatTemplate,
        name: str,
    ) -> None:
        if chat_template == "always" and tokenizer.chat_template is None:
            raise UsageError(
                f"model.policy.chat_template is 'always', but the tokenizer of '{name}' has no chat template: "
                "give 'auto' or 'never'"
            )
        self.tokenizer = tokenizer
        self.uses_template = chat_template != "never" and tokenizer.chat_template is not None
        self.end_token_ids = _end_token_ids(tokenizer, end_tokens, generation_ends, name)
        pad = tokenizer.pad_token_id
        self.pad_token_id: int = self.end_token_ids[0] if pad is None else pad
        self._left_out = {*self.end_token_ids, self.pad_token_id}
        start = tokenizer.bos_token_id
        self._start = [start] if start is not None and tokenizer.encode("a")[:1] == [start] else []

    def encode_prompt(self, prompt: str | list[dict[str, str]]) -> list[int]:
        """Token ids of a prompt, ready for a completion to follow.

        With a chat template a string becomes a user's message and the assistant's turn is opened. Without one, the
        contents of chat messages are joined by empty lines, and the start token comes first if the tokenizer puts it
        before texts by default; no other special token is added.
        """
        if self.uses_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        text = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)
        return self._start + self.encode_text(text)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text as it is."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, end and pad tokens left out, every other special token shown."""
        kept = [token for token in ids if token not in self._left_out]
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """One readable string a token, special tokens included."""
        strings = []
        for token in ids:
            text = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            raw = self.tokenizer.convert_ids_to_tokens(token)
            starts_word = isinstance(raw, str) and raw.startswith("\u2581") and not text.startswith(" ")
            strings.append(" " + text if starts_word else text)  # a lone token loses its space in some tokenizers
        return strings

    def token_char_ends(self, ids: Sequence[int]) -> list[int]:
        """For each token, the length of `decode` of everything up to and including it; never falls.

        A token that ends inside a character (bytes of it are in the next token) ends where the one before it does.
        Time is linear in the number of tokens: only a few tokens are decoded at a time.
        """
        ends: list[int] = []
        length = 0  # characters of the tokens before `settled`
        start = settled = 0  # tokens from `start` to `settled` are decoded again, as context
        for position in range(len(ids)):
            context = self.decode(ids[start:settled])
            text = self.decode(ids[start : position + 1])
            if text.endswith(UNFINISHED):
                ends.append(length)
                continue
            length += max(0, len(text) - len(context))
            ends.append(length)
            if text != context:
                start, settled = settled, position + 1
        if ends:
            ends[-1] = max(ends[-1], len(self.decode(ids)))
        return ends


def _end_token_ids(
    tokenizer: Any, names: list[str] | None, generation_ends: int | list[int] | None, model: str
) -> tuple[int, ...]:
    """The ids of the end tokens, without repetition."""
    if names is None:
        known = [generation_ends] if isinstance(generation_ends, int) else generation_ends or []
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        found = tuple(dict.fromkeys([*own, *known]))
        if not found:
            raise UsageError(f"'{model}' names no end token: give model.policy.end_tokens, tokens of its vocabulary")
        return found
    vocabulary = tokenizer.get_vocab()
    unknown = [name for name in names if name not in vocabulary]
    if unknown or not names:
        given = f"has '{unknown[0]}', which is no single token of '{model}'" if unknown else "is an empty list"
        example = f" such as '{tokenizer.eos_token}'" if tokenizer.eos_token else ""
        raise UsageError(f"model.policy.end_tokens {given}: give tokens of its vocabulary{example}")
    return tuple(dict.fromkeys(vocabulary[name] for name in names))
