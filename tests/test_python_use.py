"""The README's Python example: a fit without the command, and the loading of its checkpoint."""

import re
from pathlib import Path

import torch

from apportion.modules import PolicyGradient

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_example_runs(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 20
    for long, short in {
        "WarmStart()": "WarmStart(steps=3, demonstrations=64, cache=False)",
        "limit_train_batches=20, val_check_interval=10": "limit_train_batches=2, val_check_interval=2",
        "prompts_per_step=16": "prompts_per_step=3",
    }.items():
        assert long in code
        code = code.replace(long, short)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    loaded, trained = names["module"], names["trainer"].lightning_module
    assert isinstance(loaded, PolicyGradient)
    assert trained.rollout_step == loaded.rollout_step == 2
    for (name, ours), theirs in zip(trained.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
