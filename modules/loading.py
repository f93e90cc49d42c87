"""From a model's name to a transformers model and its tokenizer. What one does with them is in policy.py."""

import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from ..data.errors import UsageError
from .fresh import FreshModel, character_tokenizer, fresh_model

DType = Literal["float32", "bfloat16", "float64", "auto"]
PACKAGE = "package:"
TOKENIZER_FILES = ("*token*", "vocab*", "spiece*", "*.model", "*.tiktoken")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


def load(
    model: str,
    gguf_file: str | None,
    fresh: FreshModel,
    dtype: DType,
    attention: str,
    trust_remote_code: bool,
) -> tuple[Any, Any]:
    """The model (weights in `dtype`, every dropout 0) and its tokenizer.

    Args:
        model: "fresh", a local folder, "package:NAME" (the folder of an installed package, which is not imported), or
            a hub name. A name that begins with ., / or ~ or has more than one / is a folder.
        gguf_file: a GGUF file in that place.

    Raises UsageError where the model or the tokenizer is not there.
    """
    if dtype == "float64" and attention == "eager":
        raise UsageError(
            "model.policy.attention is 'eager', which computes in float32 whatever the weights, and model.policy.dtype "
            "is 'float64': give attention 'sdpa' or dtype 'float32'"
        )
    if model == "fresh":
        if gguf_file is not None:
            raise UsageError(
                f"model.policy.gguf_file is '{gguf_file}' but model.policy.model is 'fresh': name the model it is of"
            )
        tokenizer = character_tokenizer()
        with _load_errors(model, "a model", attention):
            made: Any = fresh_model(fresh, tokenizer, attention)
        for weight in made.parameters():  # buffers stay exact, see Policy._apply
            weight.data = weight.data.to(torch.float32 if dtype == "auto" else getattr(torch, dtype))
        return made, tokenizer
    place = _place(model)
    if isinstance(place, Path):
        _check_folder(model, place, gguf_file)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    with _quiet():
        with _load_errors(model, "a configuration"):
            config = AutoConfig.from_pretrained(place, **options)
        without_dropout(config)
        with _load_errors(model, "a tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
        with _load_errors(model, "a causal language model", attention):
            loaded = AutoModelForCausalLM.from_pretrained(
                place,
                config=config,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                attn_implementation=attention,
                **options,
            )
    if loaded.dtype == torch.float16:
        raise UsageError(
            f"model.policy.dtype is 'auto' and the weights of '{model}' are float16, which needs loss scaling: give "
            "'float32' or 'bfloat16'"
        )
    for module in loaded.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return loaded, tokenizer


def without_dropout(config: PreTrainedConfig) -> None:
    """Set every dropout probability of a configuration, nested ones included, to 0: in reinforcement learning the
    scorer must give what the sampler gave."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            without_dropout(value)
        elif ("dropout" in name or "pdrop" in name) and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, 0.0)


def _place(model: str) -> Path | str:
    """The folder that `model` names, or the hub name itself."""
    if model.startswith(PACKAGE):
        name = model.removeprefix(PACKAGE)
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise UsageError(
                f"model.policy.model is '{model}', but no package '{name}' is installed: install it, or check its name"
            )
        return Path(next(iter(spec.submodule_search_locations)))
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UsageError(f"model.policy.model is '{model}', but there is no such folder: check the path")
    return model


def _check_folder(model: str, folder: Path, gguf_file: str | None) -> None:
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            found = f"it has {', '.join(ggufs)}" if ggufs else "it has no .gguf file"
            raise UsageError(f"model.policy.gguf_file is '{gguf_file}', but '{model}' does not hold it: {found}")
        return  # a GGUF file carries model and tokenizer
    if not (folder / "config.json").is_file() or not _any(folder, WEIGHT_FILES):
        hint = f"model.policy.gguf_file={ggufs[0]}" if ggufs else "a folder made by save_pretrained"
        raise UsageError(
            f"model.policy.model is '{model}', a folder that holds no model (config.json and *.safetensors): "
            f"give {hint}"
        )
    if not _any(folder, TOKENIZER_FILES):
        raise UsageError(
            f"model.policy.model is '{model}', a folder that holds a model but no tokenizer (tokenizer.json or the "
            "like): save the model's tokenizer there with save_pretrained"
        )


def _any(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


@contextmanager
def _load_errors(model: str, what: str, attention: str = "") -> Iterator[None]:
    """What transformers raises for a wrong name, a broken folder or an unknown attention, as one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
        if attention and (attention in reason or "attn_implementation" in reason):
            raise UsageError(
                f"model.policy.attention is '{attention}', which '{model}' cannot use here ({reason}): give 'sdpa' "
                "or 'eager'"
            ) from error
        raise UsageError(
            f"model.policy.model is '{model}', from which {what} cannot be loaded ({reason}): give a hub name that "
            "can be reached or is in the local cache, a folder made by save_pretrained, or 'fresh'"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, and only errors, from transformers while it loads."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the bar of GGUF files listens to no setting
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
