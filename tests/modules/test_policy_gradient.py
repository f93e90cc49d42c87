"""The training loop: what is in a step's loss, what is logged, what is counted, what stops a run."""

import math

import lightning as L
import pytest
import torch
from datasets import Dataset
from lightning.pytorch.loggers import CSVLogger

from apportion.algorithms import (
    Clipped,
    GroupMean,
    KLPenalty,
    LeaveOneOut,
    Reinforce,
    StepLevel,
    TruncatedImportance,
)
from apportion.algorithms.aggregation import denominator
from apportion.data.datamodule import RolloutDataModule, Validation
from apportion.data.errors import RunError, UsageError
from apportion.data.tasks.base import Task, Verdict
from apportion.modules.policy import FreshModel, Policy
from apportion.modules.policy_gradient import PolicyGradient
from apportion.modules.reporting import Totals
from apportion.modules.samplers.generate import GenerateSampler
from tests.modules.whole_step import build_batch, build_module, build_policy


class Vowels(Task):
    """The reward is whether a completion's first letter sorts before 'h'."""

    def __init__(self, missing: str = "", prompts: int = 6) -> None:
        self.missing = missing
        self.count = prompts

    def prompts(self, split):
        letters = "abcdefghijkl" if split == "train" else "mnopqrstuvwx"
        return Dataset.from_list([{"prompt": 3 * c} for c in letters[: self.count]])

    def verify(self, completion, example):
        if self.missing and example["prompt"].startswith(self.missing):
            return Verdict(missing="the verifier does not know")
        return Verdict({"accuracy": float(completion[:1] < "h")})


def tiny(**options) -> Policy:
    options = {"max_completion_tokens": 5, **options}
    return Policy(fresh=FreshModel(layers=1, width=16, heads=2), **options)


def module_of(policy=None, estimator=None, objective=None, **options) -> PolicyGradient:
    return PolicyGradient(policy or tiny(), estimator or GroupMean(), objective or Reinforce(), **options)


def data_of(task=None, **options) -> RolloutDataModule:
    options = {"group_size": 4, "prompts_per_step": 3, "validation": Validation(prompts=3), **options}
    return RolloutDataModule(task or Vowels(), GenerateSampler(), **options)


def fit(module, data, tmp_path, **options) -> L.Trainer:
    options = {"max_epochs": 1, "limit_val_batches": 0, **options}
    trainer = L.Trainer(
        accelerator="cpu",
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(module, data)
    return trainer


def gradient_of(module, batch) -> torch.Tensor:
    module.zero_grad()
    assert module.accumulate_gradients(batch, Totals())
    return torch.cat([p.grad.flatten() for p in module.policy.parameters()])


def padded(batch, columns: int):
    """The same completions and prompts with more padding."""
    per_token = {"completion_ids", "completion_mask", "action_mask", "advantages", "step_index", "logp_ref", "logp_old"}
    changes = {}
    for name in per_token:
        value = getattr(batch, name)
        if value is not None:
            changes[name] = torch.nn.functional.pad(value, (0, columns))
    for name in ("prompt_ids", "prompt_mask"):
        changes[name] = torch.nn.functional.pad(getattr(batch, name), (columns, 0))
    return batch.replace(**changes)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant_length"])
def test_pitfall_01_gradient_does_not_depend_on_micro_batches_or_padding(aggregation):
    module = build_module(
        build_policy("float32"), GroupMean(), Clipped(), KLPenalty("k3_loss", 0.3), aggregation, entropy=0.05
    )
    batch = module.assign_credit(build_batch(torch.float32))
    gradients = []
    for tokens in (1, 12, 25, 10_000):
        module.micro_batch_tokens = tokens
        gradients.append(gradient_of(module, batch))
    gradients.append(gradient_of(module, padded(batch, 4)))
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    gradients.append(gradient_of(module, batch[order]))
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() / gradients[0].norm() < 1e-5


def test_pitfall_02_lightning_scales_nothing(tmp_path):
    """One SGD step at learning rate 1 moves the weights by exactly the gradient, however it was accumulated."""
    moved = []
    for tokens in (12, 10_000):
        module = module_of(
            optimizer=lambda p: torch.optim.SGD(p, lr=1.0), clip_gradient_norm=None, micro_batch_tokens=tokens
        )
        before = torch.nn.utils.parameters_to_vector(module.policy.parameters()).detach().clone()
        fit(module, data_of(), tmp_path, limit_train_batches=1)
        after = torch.nn.utils.parameters_to_vector(module.policy.parameters()).detach()
        assert module.record is not None
        again = module_of(micro_batch_tokens=tokens)
        again.trainer = module.trainer
        gradient = gradient_of(again, module.record.rollouts)
        torch.testing.assert_close(before - after, gradient, rtol=1e-4, atol=1e-7)
        moved.append(before - after)
    torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant_length"])
def test_pitfall_02_averaging_over_processes_is_made_up_for(aggregation, monkeypatch):
    """Two processes with groups of their own and averaged gradients give the gradient of one with all groups."""
    module = build_module(build_policy("float32"), GroupMean(), Clipped(), KLPenalty("k2_loss", 0.3), aggregation)
    batch = module.assign_credit(build_batch(torch.float32))
    alone = gradient_of(module, batch)
    counted = denominator(aggregation, batch.loss_mask, module.constant_length)
    monkeypatch.setattr(L.Trainer, "world_size", 2)
    monkeypatch.setattr(module, "_reduce_sum", lambda own: counted)
    groups = batch.rows_by_group()
    first, second = (gradient_of(module, batch[rows]) for rows in (groups[0], torch.cat(groups[1:])))
    assert ((first + second) / 2 - alone).norm() / alone.norm() < 1e-5


def test_pitfall_06_loss_is_zero_on_policy_but_the_gradient_is_not(tmp_path):
    trainer = fit(
        module_of(objective=Clipped(), aggregation="sequence_mean"), data_of(), tmp_path, limit_train_batches=1
    )
    assert abs(float(trainer.logged_metrics["train/loss"])) < 1e-6
    assert float(trainer.logged_metrics["train/grad_norm"]) > 1e-3


def test_pitfall_08_a_missing_reward_leaves_the_loss_and_the_baseline():
    """The batch without the row whose reward is missing gives the same gradient."""
    module = build_module(build_policy("float64"), GroupMean("std"), Reinforce(), None, "token_mean")
    batch = module.assign_credit(build_batch())
    without = module.assign_credit(build_batch()[batch.reward_valid])
    torch.testing.assert_close(gradient_of(module, batch), gradient_of(module, without), rtol=1e-10, atol=1e-12)


def test_pitfall_08_missing_rewards_are_counted_and_the_run_goes_on(tmp_path):
    data = data_of(Vowels(missing="a"))
    module = module_of()
    trainer = fit(module, data, tmp_path)
    assert trainer.global_step == 2
    assert data.reward_failures == {"accuracy: the verifier does not know": 4}


def test_pitfall_08_all_rewards_missing_is_an_error(tmp_path):
    with pytest.raises(RunError, match="all 12 rewards of rollout batch 0 are missing"):
        fit(module_of(), data_of(Vowels(missing=("a", "b", "c", "d", "e", "f"))), tmp_path)  # type: ignore[arg-type]


def test_pitfall_09_group_size_one_is_refused(tmp_path):
    with pytest.raises(UsageError, match="group_size is 1, but LeaveOneOut"):
        fit(module_of(estimator=LeaveOneOut()), data_of(group_size=1), tmp_path)


def test_pitfall_11_constant_groups_keep_their_kl_gradient_and_their_place_in_the_denominator():
    """Documented in `denominator`: a constant group has no policy gradient, but its tokens count."""
    plain = build_module(build_policy("float64"), GroupMean(), Reinforce(), None, "token_mean")
    batch = build_batch()
    constant = batch.replace(reward=torch.where(batch.group == 4, 1.0, batch.reward))
    with_both = plain.assign_credit(constant)
    assert (with_both.advantages[batch.group == 4] == 0).all()
    first_only = with_both[batch.group == 3]
    tokens, first_tokens = int(with_both.loss_mask.sum()), int(first_only.loss_mask.sum())
    expected = gradient_of(plain, first_only) * first_tokens / tokens
    torch.testing.assert_close(gradient_of(plain, with_both), expected, rtol=0, atol=1e-7)  # norms are fp32 in Llama

    module = build_module(build_policy("float64"), GroupMean(), Reinforce(), KLPenalty("k3_loss", 0.5), "token_mean")
    second = module.assign_credit(constant)[batch.group == 4]
    assert gradient_of(module, second).norm() > 1e-4


@pytest.mark.parametrize("constant", [(4,), (3, 4)])
def test_rows_without_credit_are_not_run_and_change_nothing(constant, monkeypatch):
    module = build_module(build_policy("float64"), GroupMean(), Clipped(), None, "token_mean")
    batch = build_batch()
    equal = torch.isin(batch.group, torch.tensor(constant))
    batch = module.assign_credit(batch.replace(reward=torch.where(equal, 1.0, batch.reward)))
    ran = []
    score = module.policy.score
    monkeypatch.setattr(module.policy, "score", lambda rows, **options: ran.append(len(rows)) or score(rows, **options))
    totals = Totals()
    assert module.accumulate_gradients(batch, totals)
    gradient = torch.cat([p.grad.flatten() for p in module.policy.parameters()])
    with_credit = ((batch.advantages != 0) & batch.loss_mask).any(1)
    assert sum(ran) == max(1, int(with_credit.sum())) < len(batch)  # one at least: the optimizer steps either way
    assert totals.counts["ratio_clipped"] == float(batch.loss_mask.sum())
    monkeypatch.setattr(module, "_rows_with_gradient", lambda batch: torch.arange(len(batch)))
    torch.testing.assert_close(gradient, gradient_of(module, batch), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("truncated", ["keep", "mask", "penalise"])
def test_pitfall_16_truncated_completions(tmp_path, truncated):
    penalty = 0.25 if truncated == "penalise" else 0.0
    data = data_of(truncated=truncated, truncation_penalty=penalty)
    module = module_of(policy=tiny(max_completion_tokens=1))
    fit(module, data, tmp_path, limit_train_batches=1)
    assert module.record is not None
    rollouts = module.record.rollouts
    cut = rollouts.truncated
    assert cut.any()
    assert (rollouts.in_loss == (~cut if truncated == "mask" else torch.ones_like(cut))).all()
    expected = rollouts.reward_terms["accuracy"] - (penalty * cut if truncated == "penalise" else 0)
    torch.testing.assert_close(rollouts.reward, expected)


def test_pitfall_17_the_sampled_ids_are_trained_on(tmp_path):
    """Not the ids of the decoded text: an end token and unknown characters would be lost."""
    seen = []
    data = data_of()
    sample = data.sampler.generate

    def spy(*arguments):
        seen.append(sample(*arguments))
        return seen[-1]

    data.sampler.generate = spy  # type: ignore[method-assign]
    module = module_of()
    fit(module, data, tmp_path, limit_train_batches=1)
    assert module.record is not None
    assert torch.equal(module.record.rollouts.completion_ids, seen[0].ids)
    assert torch.equal(module.record.rollouts.action_mask, seen[0].mask)


def test_pitfall_21_ratio_is_exactly_one_on_policy(tmp_path):
    ratios = []

    class Spy(Clipped):
        def forward(self, logp, logp_old, advantages, mask):
            ratios.append((logp - logp_old).exp()[mask])
            return super().forward(logp, logp_old, advantages, mask)

    fit(
        module_of(objective=Spy(), update_epochs=2, clip_gradient_norm=None), data_of(), tmp_path, limit_train_batches=2
    )
    first, second = ratios[::2], ratios[1::2]
    assert all((ratio == 1).all() for ratio in first)
    assert any((ratio != 1).any() for ratio in second)


def test_pitfall_22_rollouts_are_sampled_by_the_newest_weights(tmp_path):
    versions = []

    class Spy(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            versions.append((set(module.record.rollouts.policy_version.tolist()), module.policy.version))

    fit(module_of(update_epochs=2, minibatches=3), data_of(Vowels(prompts=9)), tmp_path, callbacks=[Spy()])
    assert versions == [({0}, 6), ({6}, 12), ({12}, 18)]


def test_pitfall_23_sampler_and_scorer_are_compared(tmp_path, caplog):
    module = module_of()
    trainer = fit(module, data_of(), tmp_path, limit_train_batches=1)
    assert float(trainer.logged_metrics["sampler/logp_gap_max"]) < 1e-4
    assert "disagree" not in caplog.text
    data = data_of()
    sample = data.sampler.generate

    def wrong(*arguments):
        samples = sample(*arguments)
        samples.logp = samples.logp - 0.5 * samples.mask
        return samples

    data.sampler.generate = wrong  # type: ignore[method-assign]
    trainer = fit(module_of(), data, tmp_path, limit_train_batches=1)
    assert float(trainer.logged_metrics["sampler/logp_gap_max"]) == pytest.approx(0.5, abs=1e-4)
    assert float(trainer.logged_metrics["sampler/logp_gap_mean"]) == pytest.approx(0.5, abs=1e-4)
    assert "disagree by up to 0.5 nats" in caplog.text


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_scale_the_policy_loss_only(level):
    """The gradient is that of advantages times weights; the KL term is left as it is."""
    kl = KLPenalty("k3_loss", 0.3)
    plain = build_module(build_policy("float64"), GroupMean(), Reinforce(), kl, "token_mean")
    weighted = build_module(build_policy("float64"), GroupMean(), Reinforce(), kl, "token_mean")
    weighted.mismatch = TruncatedImportance(level, cap=1.2)
    batch = plain.assign_credit(build_batch())
    noise = torch.randn(batch.advantages.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logp = plain.policy.score(batch).logp.detach()
    batch = batch.replace(logp_sampler=logp + 0.3 * noise)
    weights, capped = weighted.mismatch.weights(logp, batch.logp_sampler, batch.loss_mask)
    assert capped.any()
    assert not capped.all()
    expected = gradient_of(plain, batch.replace(advantages=batch.advantages * weights))
    torch.testing.assert_close(gradient_of(weighted, batch), expected, rtol=1e-9, atol=1e-10)


def test_the_size_of_importance_weights_is_logged(tmp_path):
    trainer = fit(module_of(mismatch=TruncatedImportance()), data_of(), tmp_path, limit_train_batches=1)
    assert float(trainer.logged_metrics["sampler/importance_weight"]) == pytest.approx(1.0, abs=1e-4)
    assert float(trainer.logged_metrics["sampler/importance_capped"]) == 0


def test_pitfall_24_members_of_a_group_differ(tmp_path):
    module = module_of()
    fit(module, data_of(), tmp_path, limit_train_batches=1)
    assert module.record is not None
    for rows in module.record.rollouts.rows_by_group():
        assert len({module.record.rollouts.completion_texts[i] for i in rows}) > 1


def test_pitfall_30_a_nan_stops_the_run_and_names_step_prompts_and_term(tmp_path):
    class Poisoned(GroupMean):
        def __call__(self, rollouts, signals, context):
            return super().__call__(rollouts, signals, context) + math.nan

    with pytest.raises(
        RunError, match=r"policy loss is nan at rollout batch 0, optimizer step 0 \(prompts \d, \d, \d\)"
    ):
        fit(module_of(estimator=Poisoned()), data_of(), tmp_path)


def test_pitfall_30_a_gradient_that_is_not_finite_stops_the_run_before_the_update(tmp_path):
    module = module_of()
    weight = module.policy.model.lm_head.weight
    weight.register_hook(lambda gradient: gradient * math.inf)
    before = weight.detach().clone()
    with pytest.raises(RunError, match=r"gradient norm is (nan|inf) at rollout batch 0, optimizer step 0 \(prompts \d"):
        fit(module, data_of(), tmp_path)
    assert torch.equal(weight.detach().cpu(), before)


def test_pitfall_31_steps_are_optimizer_steps_and_the_axis_is_rollout_batches(tmp_path):
    module, data = module_of(update_epochs=2, minibatches=3), data_of(Vowels(prompts=9))
    trainer = fit(module, data, tmp_path, limit_val_batches=1, val_check_interval=1)
    assert (trainer.global_step, module.policy.version, module.rollout_step) == (18, 18, 3)
    assert float(trainer.logged_metrics["trainer/global_step"]) == 18
    assert (data.budget.prompts, data.budget.completions) == (9, 36)  # validation is not in it
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    step = rows[0].split(",").index("step")
    assert {row.split(",")[step] for row in rows[1:]} == {"0", "1", "2"}


def test_pitfall_32_micro_batch_size_is_resolved_once_and_kept_on_resume(tmp_path):
    module = module_of()
    assert module.micro_batch_tokens > 0
    assert module.hparams["micro_batch_tokens"] == module.micro_batch_tokens
    trainer = fit(module, data_of(), tmp_path, limit_train_batches=1)
    module.micro_batch_tokens = 77  # as if resolved on another machine
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = module_of()
    L.Trainer(
        accelerator="cpu",
        logger=False,
        max_epochs=1,
        limit_train_batches=1,
        limit_val_batches=0,
        enable_checkpointing=False,
    ).fit(again, data_of(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert again.micro_batch_tokens == 77
    explicit = module_of(micro_batch_tokens=30)
    assert explicit.micro_batch_tokens == 30


def test_step_level_is_refused_where_the_task_judges_no_steps(tmp_path):
    with pytest.raises(UsageError, match="StepLevel needs a verdict on each step, and the task Vowels"):
        fit(module_of(estimator=StepLevel()), data_of(), tmp_path)


def test_top_p_is_refused_for_training(tmp_path):
    with pytest.raises(UsageError, match="top_p"):
        fit(module_of(policy=tiny(top_p=0.9)), data_of(), tmp_path)


def test_loading_a_checkpoint_needs_nothing_else(tmp_path):
    module = module_of(estimator=GroupMean(scale="std", epsilon=1e-3), kl=KLPenalty("k3_loss", 0.1))
    trainer = fit(module, data_of(), tmp_path, limit_train_batches=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = PolicyGradient.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert isinstance(again.estimator, GroupMean)
    assert (again.estimator.scale, again.estimator.epsilon, again.kl.form) == ("std", 1e-3, "k3_loss")
    assert (again.rollout_step, again.policy.version) == (1, 1)
    for (name, ours), theirs in zip(module.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_the_same_seed_gives_the_same_run(tmp_path):
    weights = []
    for seed in (3, 3, 4):
        module = module_of(minibatches=2)
        fit(module, data_of(seed=seed), tmp_path)
        weights.append(torch.nn.utils.parameters_to_vector(module.policy.parameters()).detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
