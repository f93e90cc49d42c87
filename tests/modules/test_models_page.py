"""The table of docs/models.md is what the code does with the tiny models."""

import logging
from pathlib import Path

from apportion.modules.lean_pass import unlike_llama
from apportion.modules.shared_prompts import why_not_shared
from tests.modules.tiny_models import CANNOT_SHARE, CONFIGS, ONLY_EAGER, tiny_policy

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = ["| architecture | attention | shared prompts | lean layers | why not |", "| --- | --- | --- | --- | --- |"]


def row(kind: str, folder: Path, caplog) -> str:
    caplog.clear()
    policy = tiny_policy(kind, folder, "float32")
    reason = why_not_shared(policy.split)
    assert policy.shares_prompts == (reason is None)
    assert f"cannot share a prompt between its completions ({reason})" in caplog.text or policy.shares_prompts
    reason = reason or unlike_llama(policy.model)
    lean = policy.split.lean and reason is None
    attention = "eager" if kind in ONLY_EAGER else "sdpa"
    yes = [("no", "yes")[found] for found in (policy.shares_prompts, lean)]
    return f"| {type(policy.model).__name__} | {attention} | {yes[0]} | {yes[1]} | {reason or ''} |".replace(
        "|  |", "| |"
    )


def test_the_table_is_what_the_code_does(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="apportion"):
        rows = [row(kind, tmp_path / kind, caplog) for kind in CONFIGS | CANNOT_SHARE]
    table = "\n".join([*HEAD, *dict.fromkeys(rows)])  # several kinds of one architecture are one row
    written = PAGE.read_text().partition("<!-- models -->\n")[2].partition("\n<!-- end -->")[0]
    assert written == table, f"docs/models.md should say:\n{table}"
