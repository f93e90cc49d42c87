"""The warm start: its loss, alone and inside another fit, and its cache."""

import random

import lightning as L
import numpy as np
import pytest
import torch
from datasets import Dataset

from apportion.data.errors import RunError, UsageError
from apportion.data.sampler import Limits
from apportion.data.tasks.base import Task, Verdict
from apportion.data.tasks.running_sums import RunningSums
from apportion.modules.fresh import FreshModel
from apportion.modules.policy import Policy
from apportion.modules.samplers import GenerateSampler
from apportion.modules.warm_start import WarmStart, collate, encode
from apportion.modules.warm_start_cache import WarmStartCache
from tests.modules.tiny_models import exact_norms

FAST = {"demonstrations": 40, "steps": 12, "batch_size": 8, "peak_learning_rate": 1e-2}


class Echo(Task):
    """Repeat the digit."""

    def prompts(self, split):
        return Dataset.from_dict({"prompt": ["1="]})

    def verify(self, completion, example):
        return Verdict({"accuracy": 0.0})

    def demonstrations(self, count, seed, error):
        digits = [str((seed + k) % 10) for k in range(count)]
        return Dataset.from_dict(
            {"prompt": [f"{'0' * (k % 3)}{d}=" for k, d in enumerate(digits)], "completion": digits}
        )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "warm_start"


@pytest.fixture
def trainer():
    return L.Trainer(accelerator="cpu", barebones=True)


def tiny(**options) -> Policy:
    return Policy(fresh=FreshModel(width=16, heads=2), max_completion_tokens=24, **options)


def weights(policy):
    return torch.cat([p.detach().flatten() for p in policy.parameters()]).clone()


def test_loss_is_the_mean_over_the_completions_tokens():
    """Whatever the policy's temperature; the prompt is no part of it, the end token is."""
    policy = tiny(dtype="float64", temperature=0.5)
    exact_norms(policy.model)
    module = WarmStart(policy)
    rows = [
        (policy.encode_prompt(p), [*policy.encode_text(c), 1]) for p, c in (("12=", "3"), ("4+5+6=", "4+5=9;9+6=5;"))
    ]
    module.log_dict = lambda *_, **__: None  # type: ignore[method-assign]
    module.optimizers = lambda: torch.optim.SGD(policy.parameters(), lr=1.0)  # type: ignore[method-assign]
    loss = module.training_step(collate(rows, 0), 0)
    total, tokens = 0.0, 0
    for prompt, completion in rows:
        logits = policy.model(input_ids=torch.tensor([prompt + completion])).logits[0].log_softmax(-1).detach()
        total -= sum(float(logits[len(prompt) + t - 1, token]) for t, token in enumerate(completion))
        tokens += len(completion)
    assert loss.item() == pytest.approx(total / tokens, rel=1e-12)
    assert loss.requires_grad


def test_demonstrations_end_with_the_end_token_and_fit():
    policy = tiny(end_tokens=["A", "<eos>"])
    rows = encode(policy, Dataset.from_dict({"prompt": ["1+2="], "completion": ["1+2=3;"]}))
    assert rows == [(policy.encode_prompt("1+2="), [*policy.encode_text("1+2=3;"), policy.end_token_ids[0]])]
    with pytest.raises(UsageError, match="demonstrations of 25 tokens"):
        encode(policy, Dataset.from_dict({"prompt": ["1"], "completion": ["2" * 24]}))


def test_alone_it_is_an_ordinary_module(tmp_path):
    policy = tiny()
    module = WarmStart(policy, **FAST)
    alone = L.Trainer(
        accelerator="cpu",
        max_steps=12,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    before = weights(policy)
    alone.fit(module, train_dataloaders=module.loader(Echo().demonstrations(40, 0, 0.0)))
    assert not torch.equal(before, weights(policy))
    assert alone.callback_metrics["warmup/loss"] < 4.2  # ln 99 = 4.6 at the start
    alone.save_checkpoint(tmp_path / "x.ckpt")
    again = WarmStart.load_from_checkpoint(tmp_path / "x.ckpt")
    assert isinstance(again.policy, Policy)
    assert torch.equal(weights(again.policy), weights(policy))
    assert again.steps == 12


def test_run_trains_in_place_and_leaves_no_trace(trainer, cache):
    policy = tiny()
    policy.model.lm_head.eval()
    modes = [module.training for module in policy.modules()]
    parameters = list(policy.parameters())
    before = weights(policy)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    logged = []
    warm_start = WarmStart(**FAST)
    warm_start.run(policy, Echo(), trainer, lambda metrics, step: logged.append((step, metrics)))
    assert not torch.equal(weights(policy), before)
    assert [id(p) for p in policy.parameters()] == [id(p) for p in parameters]
    assert all(p.grad is None and p.requires_grad for p in parameters)
    assert [module.training for module in policy.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]
    assert policy.version == 0
    assert [step for step, _ in logged] == list(range(12))
    assert all(set(metrics) == {"warmup/loss", "warmup/lr"} for _, metrics in logged)
    assert logged[-1][1]["warmup/loss"] < logged[0][1]["warmup/loss"] - 0.5
    assert max(metrics["warmup/lr"] for _, metrics in logged) == pytest.approx(1e-2, rel=0.02)
    # inside a PolicyGradient it must bring no weights of its own into the checkpoint
    assert warm_start.state_dict() == {}
    assert list(warm_start.parameters()) == []
    assert [path.suffix for path in cache.iterdir()] == [".safetensors"]


def test_an_equal_run_comes_from_the_cache(trainer, monkeypatch):
    first, second = tiny(), tiny(temperature=0.5)  # the temperature has no part in the training
    logs: list[list] = [[], []]
    WarmStart(**FAST).run(first, Echo(), trainer, lambda *entry: logs[0].append(entry))
    monkeypatch.setattr(L.Trainer, "fit", lambda *_, **__: pytest.fail("it was trained again"))
    with torch.inference_mode():  # where Lightning runs the hooks of validation
        WarmStart(**FAST).run(second, Echo(), trainer, lambda *entry: logs[1].append(entry))
    assert torch.equal(weights(first), weights(second))
    assert logs[0] == logs[1]
    second.score(collate([([5], [6])], 0)).logp.sum().backward()


def test_training_works_inside_lightnings_inference_mode(trainer):
    trained, expected = tiny(), tiny()
    WarmStart(**FAST, cache=False).run(expected, Echo(), trainer, lambda *_: None)
    with torch.inference_mode():
        WarmStart(**FAST, cache=False).run(trained, Echo(), trainer, lambda *_: None)
    assert torch.equal(weights(trained), weights(expected))


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"steps": 11}, {}),
        ({"seed": 1}, {}),
        ({"peak_learning_rate": 2e-2}, {}),
        ({"clip_gradient_norm": 0.5}, {}),
        ({}, {"end_tokens": ["A"]}),
        ({}, {"dtype": "float64"}),
    ],
)
def test_any_difference_gives_another_entry(trainer, cache, options, policy):
    WarmStart(**FAST).run(tiny(), Echo(), trainer, lambda *_: None)
    WarmStart(**{**FAST, **options}).run(tiny(**policy), Echo(), trainer, lambda *_: None)
    assert len(list(cache.iterdir())) == 2


def test_initial_weights_are_part_of_the_key(trainer, cache):
    for seed in (0, 1):
        policy = Policy(fresh=FreshModel(width=16, heads=2, seed=seed))
        WarmStart(**FAST).run(policy, Echo(), trainer, lambda *_: None)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"nonsense" * 9, "cut", "other shape"])
def test_a_damaged_file_is_replaced(trainer, cache, caplog, damage):
    expected = tiny()
    WarmStart(**FAST).run(expected, Echo(), trainer, lambda *_: None)
    (file,) = cache.iterdir()
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "other shape":
        WarmStartCache(file).save(Policy(fresh=FreshModel(width=24, heads=2)), [])
    else:
        file.write_bytes(damage)
    policy = tiny()
    WarmStart(**FAST).run(policy, Echo(), trainer, lambda *_: None)
    assert "damaged" in caplog.text
    torch.testing.assert_close(weights(policy), weights(expected))
    assert WarmStartCache(file).load(tiny()) is not None


def test_no_cache_and_a_folder_that_cannot_be_written(trainer, cache, caplog):
    WarmStart(**FAST, cache=False).run(tiny(), Echo(), trainer, lambda *_: None)
    assert not cache.exists()
    cache.parent.write_text("a file where the folder should be")
    WarmStart(**FAST).run(tiny(), Echo(), trainer, lambda *_: None)
    assert "could not be kept" in caplog.text


def test_an_interrupted_run_is_an_error_and_is_not_kept(trainer, cache, monkeypatch):
    step = WarmStart.training_step

    def stopping(self, batch, batch_idx):
        self.trainer.should_stop = batch_idx == 3
        return step(self, batch, batch_idx)

    monkeypatch.setattr(WarmStart, "training_step", stopping)
    with pytest.raises(RunError, match="after 4 of 12 steps"):
        WarmStart(**FAST).run(tiny(), Echo(), trainer, lambda *_: None)
    assert not cache.exists()


def test_a_loss_that_is_not_finite_is_an_error(trainer):
    policy = tiny()
    with torch.no_grad():
        policy.model.lm_head.weight[3] = torch.nan
    with pytest.raises(RunError, match="loss of the warm start is nan"):
        WarmStart(**FAST).run(policy, Echo(), trainer, lambda *_: None)


def test_bad_requests(trainer):
    class Plain(Echo):
        demonstrations = Task.demonstrations

    with pytest.raises(UsageError, match="no worked demonstrations"):
        WarmStart(**FAST).run(tiny(), Plain(), trainer, lambda *_: None)
    with pytest.raises(UsageError, match="a policy of its own"):
        WarmStart(tiny(), **FAST).run(tiny(), Echo(), trainer, lambda *_: None)
    with pytest.raises(UsageError, match="no policy to train"):
        WarmStart(**FAST).loader(Echo().demonstrations(4, 0, 0.0))
    for options in (
        {"steps": 0},
        {"batch_size": 0},
        {"demonstrations": 0},
        {"peak_learning_rate": 0.0},
        {"teacher_error": 1.5},
    ):
        with pytest.raises(UsageError, match=f"warm_start.{next(iter(options))} is"):
            WarmStart(**options)


def test_the_order_is_drawn_from_the_seed_and_uses_all():
    policy = tiny()
    demonstrations = Echo().demonstrations(40, 0, 0.0)

    def order(seed):
        module = WarmStart(policy, **{**FAST, "steps": 10}, seed=seed)
        batches = list(module.loader(demonstrations))
        return [tuple(row.tolist()) for batch in batches for row in batch.prompt_ids[:, -3:]]

    assert len(order(0)) == 80
    assert order(0) == order(0) != order(1)
    counts = {row: order(0).count(row) for row in order(0)}
    assert sum(counts.values()) == 80


@pytest.mark.slow
def test_a_warm_policy_gets_half_of_running_sums_right(trainer):
    task = RunningSums()
    policy = Policy(max_completion_tokens=40)
    WarmStart().run(policy, task, trainer, lambda *_: None)
    rows = list(task.prompts("validation"))
    samples = GenerateSampler(200).sample(
        policy,
        [policy.encode_prompt(row["prompt"]) for row in rows],
        2,
        "validation",
        Limits(40),
        prompt_ids=range(len(rows)),
        step=0,
    )
    texts = [policy.decode(ids[mask].tolist()) for ids, mask in zip(samples.ids, samples.mask, strict=True)]
    right = [task.verify(text, rows[i // 2]).terms["accuracy"] for i, text in enumerate(texts)]
    assert 0.3 < sum(right) / len(right) < 0.65
