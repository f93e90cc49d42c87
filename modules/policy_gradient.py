"""The LightningModule: collect rollouts, assign credit, update. `training_step` is the whole loop on one screen."""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..algorithms.advantages.base import AdvantageContext, AdvantageEstimator
from ..algorithms.aggregation import aggregate, check_aggregation, denominator
from ..algorithms.kl import KLPenalty
from ..algorithms.mismatch import TruncatedImportance
from ..algorithms.objectives.base import PolicyObjective
from ..data.batch import RolloutBatch
from ..data.configurable import Configurable, describe
from ..data.datamodule import RolloutDataModule
from ..data.errors import RunError, UsageError
from .checkpoint import KEY, saved_state
from .credit import assign_credit, credit_needs
from .losses import loss_terms
from .memory import resolve_micro_batch_tokens
from .policy import Policy
from .predictions import prediction_rows
from .reporting import Totals, rollout_metrics
from .sharding import gathered
from .signals import SignalContext, SignalProvider, Signals, providers_for
from .trainer_options import check_precision, check_validation_interval
from .validation import ValidationMetrics
from .warm_start import WarmStart


@dataclass
class StepRecord:
    """What callbacks may look at after a training step: the rollouts with their advantages, and where the time went.

    seconds: by phase: "rollout" (sampling and verifying), "score" (signals and advantages), "update".
    """

    rollouts: RolloutBatch
    seconds: dict[str, float] = field(default_factory=dict)


class PolicyGradient(Configurable, L.LightningModule):
    """Policy-gradient training of a causal language model with any advantage estimator, objective and KL form.

    Args:
        policy: the language model that is trained.
        estimator: turns rewards into one advantage per token.
        objective: the loss that the advantages are put into.
        kl: a penalty on the distance to the starting policy; none by default. Keeps a frozen copy in memory.
        aggregation: how token losses become one number: token_mean, sequence_mean, sequence_sum or constant_length.
        constant_length: the length that aggregation=constant_length divides by; the policy's max_completion_tokens
            unless given.
        update_epochs: passes over each rollout batch.
        minibatches: optimizer steps in a pass, each on whole groups.
        micro_batch_tokens: tokens in one forward and backward pass. Chosen once from memory and model unless
            given; the number is written to the configuration and the checkpoint.
        entropy: coefficient of an entropy bonus; 0 = off.
        mismatch: importance weights for the difference between sampler and scorer; none by default.
        clip_gradient_norm: largest gradient norm; none = no clipping.
        optimizer: AdamW at a learning rate of 1e-5 without weight decay unless given.
        lr_scheduler: stepped once a rollout batch; none = a constant learning rate.
        warm_start: supervised training on the task's worked demonstrations before the first step, for a fresh policy.
        signals: providers to use instead of the shipped ones.
    """

    def __init__(
        self,
        policy: Policy,
        estimator: AdvantageEstimator,
        objective: PolicyObjective,
        kl: KLPenalty | None = None,
        aggregation: str = "token_mean",
        constant_length: int | None = None,
        update_epochs: int = 1,
        minibatches: int = 1,
        micro_batch_tokens: int | None = None,
        entropy: float = 0.0,
        mismatch: TruncatedImportance | None = None,
        clip_gradient_norm: float | None = 1.0,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        warm_start: WarmStart | None = None,
        signals: list[SignalProvider] | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        for name, value in (("update_epochs", update_epochs), ("minibatches", minibatches)):
            if value < 1:
                raise UsageError(f"model.{name} is {value}: give a whole number of at least 1")
        if micro_batch_tokens is not None and micro_batch_tokens < 1:
            raise UsageError(f"model.micro_batch_tokens is {micro_batch_tokens}: give at least 1, or leave it out")
        if aggregation == "constant_length" and constant_length is None:
            constant_length = policy.max_completion_tokens
        check_aggregation(aggregation, constant_length, objective)
        self.policy = policy
        self.estimator = estimator
        self.objective = objective
        self.kl = kl if kl is not None and kl.coefficient != 0 else None
        self.aggregation = aggregation
        self.constant_length = constant_length
        self.update_epochs = update_epochs
        self.minibatches = minibatches
        self.chooses_micro_batch = micro_batch_tokens is None
        self.micro_batch_tokens = micro_batch_tokens or resolve_micro_batch_tokens(policy, policy.device)
        self.entropy = entropy
        self.mismatch = mismatch
        self.clip_gradient_norm = clip_gradient_norm
        self.optimizer_factory = optimizer or default_optimizer
        self.scheduler_factory = lr_scheduler
        self.warm_start = warm_start
        self.reference = policy.frozen_copy() if self.kl is not None else None
        self.needs = credit_needs(estimator, self.kl, update_epochs * minibatches)
        self._providers = providers_for(self.needs, signals or [])
        self.providers = nn.ModuleDict({type(p).__name__: p for p in self._providers.values()})

        self.rollout_step = 0
        self.record: StepRecord | None = None
        self.phase = ""
        self.seconds: dict[str, float] = {}
        self.validation_metrics: ValidationMetrics | None = None
        self.save_hyperparameters(self._described())

    # ---- one training step ---------------------------------------------------------------------------------------

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> None:
        self.seconds = {}
        with self._timed("rollout", "sampling"):
            rollouts = self.datamodule.collect(batch, self.policy, self.rollout_step).to(self.device)
        with self._timed("score", "scoring"):
            rollouts = self.assign_credit(rollouts)
        with self._timed("update", "updating"):
            totals = Totals()
            for epoch in range(self.update_epochs):
                for rows in self._minibatches(rollouts, epoch):
                    self.optimizer_step_on(rollouts[rows], totals)
        self.rollout_step += 1
        self._step_schedules()
        self.record = StepRecord(rollouts, self.seconds)
        self._log_step(rollouts, totals)

    def assign_credit(self, rollouts: RolloutBatch) -> RolloutBatch:
        """The batch with advantages, and with the old and reference log-probabilities that the update will need."""
        context = AdvantageContext(self._reduce_sum)
        return assign_credit(rollouts, self.estimator, self.kl, self.signals(rollouts), context)

    def signals(self, rollouts: RolloutBatch) -> Signals:
        """What estimator and KL penalty declared that they need, computed when it is read."""
        context = SignalContext(
            policy=self.policy,
            reference=self.reference,
            sampler=self.datamodule.sampler,
            task=self.datamodule.task,
            budget=self.datamodule.budget,
            step=self.rollout_step,
            run_seed=self.datamodule.seed,
            micro_batch_tokens=self.micro_batch_tokens,
        )
        return Signals(self.needs, self._providers, rollouts, context)

    def optimizer_step_on(self, batch: RolloutBatch, totals: Totals) -> None:
        """One optimizer step on one optimizer batch."""
        if not self.accumulate_gradients(batch, totals):
            return
        norm = nn.utils.clip_grad_norm_(
            [p for p in self.parameters() if p.grad is not None],
            math.inf if self.clip_gradient_norm is None else self.clip_gradient_norm,
        )
        if not torch.isfinite(norm):
            raise RunError(self._not_finite(batch, "gradient norm", float(norm)))
        totals.add("grad_norm", norm, 1)
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.policy.version += 1

    def accumulate_gradients(self, batch: RolloutBatch, totals: Totals) -> bool:
        """The gradient of the loss of one optimizer batch, micro-batch by micro-batch. The denominator is counted over
        the whole batch (and all processes) before the first backward pass. False if no row may be in a loss."""
        below = denominator(self.aggregation, batch.loss_mask, self.constant_length, self._reduce_sum)
        if float(below) == 0:
            return False
        learning = batch[self._rows_with_gradient(batch)]
        micro_batches = list(self.policy.micro_batches(learning, self.micro_batch_tokens))
        with gathered(self.policy):
            for number, rows in enumerate(micro_batches):
                with self._gradients_synchronised(number == len(micro_batches) - 1):
                    # processes average their gradients, while the denominator is already the sum over processes
                    loss = self.micro_batch_loss(learning[rows], below, totals) * self.trainer.world_size
                    self.manual_backward(loss)
        if "ratio_clipped" in totals.sums:  # what was left out has no clipped token
            totals.counts["ratio_clipped"] += float(batch.loss_mask.sum() - learning.loss_mask.sum())
        return True

    def _rows_with_gradient(self, batch: RolloutBatch) -> Tensor:
        """The rows that a forward pass is worth: those with credit, unless KL or entropy gives every row a gradient.
        At least one, so that the optimizer steps on a gradient of 0 where there is none."""
        if self.kl is not None or self.entropy or batch.advantages is None:
            return torch.arange(len(batch), device=batch.group.device)
        rows = ((batch.advantages != 0) & batch.loss_mask).any(1).nonzero().squeeze(1)
        return rows if len(rows) else batch.loss_mask.any(1).nonzero()[0]

    def micro_batch_loss(self, micro: RolloutBatch, below: Tensor, totals: Totals) -> Tensor:
        """The micro-batch's share of the optimizer batch's loss; the shares of all micro-batches add up to the loss."""
        terms = loss_terms(self.policy, self.objective, self.kl, self.entropy, self.mismatch, micro, totals)
        shares = []
        for name, term in terms.items():
            share = aggregate(term, micro.loss_mask, self.aggregation, below, self.constant_length)
            if not torch.isfinite(share):
                raise RunError(self._not_finite(micro, f"{name} loss", float(share.detach())))
            shares.append(share)
        loss = torch.stack(shares).sum()
        totals.add("loss", loss, 0)
        return loss

    def _minibatches(self, rollouts: RolloutBatch, epoch: int) -> Iterator[Tensor]:
        """Row indices of each minibatch: whole groups, in an order drawn from (seed, step, epoch)."""
        groups = rollouts.rows_by_group()
        if self.minibatches == 1:
            yield torch.arange(len(rollouts), device=rollouts.group.device)
            return
        if self.minibatches > len(groups):
            raise UsageError(
                f"model.minibatches is {self.minibatches}, but a rollout batch has {len(groups)} groups and a "
                "minibatch holds whole groups: lower it or raise data.prompts_per_step"
            )
        seed = (self.datamodule.seed * 1_000_003 + self.rollout_step) * 1_009 + epoch
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
        for part in range(self.minibatches):
            yield torch.cat([groups[g] for g in order[part :: self.minibatches]]).sort().values

    # ---- validation and prediction -------------------------------------------------------------------------------

    def validation_step(self, batch: list[dict[str, Any]], batch_idx: int, dataloader_idx: int = 0) -> None:
        with self._timed("validation", "validating"):
            _, verdicts = self.datamodule.evaluate(batch, self.policy, dataloader_idx)
        assert self.validation_metrics is not None
        self.validation_metrics.update(dataloader_idx, verdicts)

    def on_validation_epoch_start(self) -> None:
        self._start_evaluation()

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    test_step = validation_step

    def on_test_epoch_start(self) -> None:
        self._start_evaluation()

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def predict_step(self, batch: list[dict[str, Any]], batch_idx: int) -> list[dict[str, Any]]:
        """Completions with verdicts and per-token advantages, one plain dict a completion."""
        rollouts = self.datamodule.collect(batch, self.policy, 0, purpose="validation").to(self.device)
        return prediction_rows(self.assign_credit(rollouts), self.policy)

    def _start_evaluation(self) -> None:
        if self.validation_metrics is None:
            self.validation_metrics = ValidationMetrics(
                list(self.datamodule.validation_tasks), self.datamodule.validation.pass_at
            ).to(self.device)

    def _log_evaluation(self, prefix: str) -> None:
        assert self.validation_metrics is not None
        self.log_dict(self.validation_metrics.compute(prefix), batch_size=1)
        self.validation_metrics.reset()

    # ---- start, state, and what Lightning asks for ---------------------------------------------------------------

    @property
    def datamodule(self) -> RolloutDataModule:
        return cast(RolloutDataModule, self.trainer.datamodule)  # type: ignore[attr-defined]

    def resolve_micro_batch_tokens(self, device: torch.device) -> None:
        """Choose the size of a micro-batch for the device that the training will be on, unless it was given."""
        if self.chooses_micro_batch:
            self.micro_batch_tokens = resolve_micro_batch_tokens(self.policy, device)
            self.hparams["micro_batch_tokens"] = self.micro_batch_tokens

    def setup(self, stage: str) -> None:
        if not isinstance(getattr(self.trainer, "datamodule", None), RolloutDataModule):
            raise UsageError("PolicyGradient trains on a RolloutDataModule: call trainer.fit(module, datamodule=…)")
        check_precision(self.trainer)
        self.resolve_micro_batch_tokens(self.trainer.strategy.root_device)
        asked_by = type(self.estimator).__name__
        if self.datamodule.group_size < self.estimator.smallest_group:
            raise UsageError(
                f"data.group_size is {self.datamodule.group_size}, but {asked_by} compares completions of one prompt "
                f"with each other and needs at least {self.estimator.smallest_group}: raise data.group_size"
            )
        for provider in self.providers.values():
            cast(SignalProvider, provider).check(self.datamodule.task, asked_by)
        if stage == "fit":
            check_validation_interval(self.trainer, self.datamodule.batches_in_an_epoch)
            self.policy.check_trainable_distribution()

    def on_fit_start(self) -> None:
        self._warm_up()

    def on_validation_start(self) -> None:
        if self.trainer.state.fn != TrainerFn.FITTING:
            self._warm_up()

    def on_test_start(self) -> None:
        self._warm_up()

    def on_predict_start(self) -> None:
        self._warm_up()

    def _warm_up(self) -> None:
        """Run the warm start once, unless the weights come from a checkpoint."""
        if self.warm_start is None or self.trainer.ckpt_path is not None or self.rollout_step:
            return

        def log(metrics: dict[str, float], step: int) -> None:
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics, step)

        with self._timed("warm_start", "warming up"):
            self.warm_start.run(self.policy, self.datamodule.task, self.trainer, log)
        if self.reference is not None:
            self.reference.load_state_dict(self.policy.state_dict())

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        option = "model.optimizer"
        try:
            optimizer = self.optimizer_factory(trainable)
            if self.scheduler_factory is None:
                return optimizer
            option = "model.lr_scheduler"
            return {"optimizer": optimizer, "lr_scheduler": self.scheduler_factory(optimizer)}
        except (TypeError, ValueError) as error:
            raise UsageError(f"{option} cannot be made of its options ({error}): mend them") from error

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = {
            "rollout_step": self.rollout_step,
            "policy_version": self.policy.version,
            "micro_batch_tokens": self.micro_batch_tokens,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = saved_state(checkpoint, self.state_dict())
        self.rollout_step = state["rollout_step"]
        self.policy.version = state["policy_version"]
        if self.chooses_micro_batch:
            self.micro_batch_tokens = state["micro_batch_tokens"]

    # ---- small helpers -------------------------------------------------------------------------------------------

    def _described(self) -> dict[str, Any]:
        """Constructor arguments as plain data, resolved. The optimizer and its schedule are functions, not data: they
        are given anew when training goes on."""
        given = {k: v for k, v in self._arguments.items() if k not in ("optimizer", "lr_scheduler")}
        given |= {"micro_batch_tokens": self.micro_batch_tokens, "constant_length": self.constant_length}
        return {"_instantiator": "lightning.pytorch.cli.instantiate_module", **describe(given)}

    def _step_schedules(self) -> None:
        schedule = self.lr_schedulers()
        if schedule is not None:
            cast(Any, schedule).step()

    def _reduce_sum(self, value: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return value
        return cast(Tensor, self.trainer.strategy.reduce(value, reduce_op="sum"))

    def _gradients_synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Between processes gradients are exchanged once an optimizer step, with the last micro-batch: processes may
        have different numbers of them."""
        if isinstance(self.policy, FSDPModule):
            self.policy.set_requires_gradient_sync(last)
        blocked = getattr(self.trainer.strategy, "block_backward_sync", None)
        return nullcontext() if last or blocked is None else blocked()

    @contextmanager
    def _timed(self, name: str, phase: str) -> Iterator[None]:
        self.phase = phase
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.phase = ""

    def _not_finite(self, batch: RolloutBatch, what: str, value: float) -> str:
        prompts = ", ".join(str(p) for p in sorted(set(batch.prompt_id.tolist())))
        return (
            f"the {what} is {value} at rollout batch {self.rollout_step}, optimizer step {self.policy.version} "
            f"(prompts {prompts}): nothing was updated; lower the learning rate or look at these prompts' rewards"
        )

    def _log_step(self, rollouts: RolloutBatch, totals: Totals) -> None:
        values = rollout_metrics(rollouts, totals, self._reduce_sum)
        values["trainer/global_step"] = float(self.trainer.global_step)
        self.log_dict(values, batch_size=1)
        totals.warn_of_gap(self.trainer.precision)


def default_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW at 1e-5 without weight decay: the usual choice for reinforcement learning of pre-trained models."""
    return torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.0, fused=True)
