"""What every estimator and every objective must do. They are found by themselves, with every value of every option
that has a list of values; adding one needs nothing here."""

import importlib
import inspect
import itertools
import pkgutil
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import apportion.algorithms
from apportion.algorithms import AGGREGATIONS, AdvantageContext, AdvantageEstimator, PolicyObjective
from apportion.data.batch import RolloutBatch
from apportion.data.configurable import describe

Build = Callable[..., RolloutBatch]


def found(base: type) -> list[type]:
    """All concrete subclasses defined anywhere under apportion.algorithms."""
    package = apportion.algorithms
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)

    def below(cls: type) -> Iterator[type]:
        for child in cls.__subclasses__():
            if child.__module__.startswith(package.__name__ + ".") and not inspect.isabstract(child):
                yield child
            yield from below(child)

    return sorted(set(below(base)), key=lambda cls: cls.__name__)


def variants(cls: type) -> Iterator[Any]:
    """One object for each combination of the values of its Literal and bool options, all else by default."""
    values: dict[str, list[Any]] = {}
    if "__init__" in vars(cls):
        hints = typing.get_type_hints(inspect.unwrap(cls.__init__))
        for name, hint in hints.items():
            if typing.get_origin(hint) is Literal:
                values[name] = list(typing.get_args(hint))
            elif hint is bool:
                values[name] = [False, True]
    for chosen in itertools.product(*values.values()):
        options = dict(zip(values, chosen, strict=True))
        yield pytest.param(cls, options, id="-".join([cls.__name__, *map(str, chosen)]))


ESTIMATORS, OBJECTIVES = found(AdvantageEstimator), found(PolicyObjective)
each_estimator = pytest.mark.parametrize(("cls", "options"), [v for cls in ESTIMATORS for v in variants(cls)])
each_objective = pytest.mark.parametrize(("cls", "options"), [v for cls in OBJECTIVES for v in variants(cls)])
each_class = pytest.mark.parametrize("cls", ESTIMATORS + OBJECTIVES)


class Declared(Mapping[str, Tensor]):
    """Signals of which only the declared ones may be read."""

    def __init__(self, estimator: AdvantageEstimator, values: Mapping[str, Tensor]) -> None:
        self._needs, self._values = estimator.needs, values

    def __getitem__(self, name: str) -> Tensor:
        assert name in self._needs, f"'{name}' was read, but only {sorted(self._needs)} are declared"
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._needs)

    def __len__(self) -> int:
        return len(self._needs)


def credit(estimator: AdvantageEstimator, rollouts: RolloutBatch, signals: Mapping[str, Tensor]) -> Tensor:
    before = rollouts.reward.clone()
    advantages = estimator(rollouts, Declared(estimator, signals), AdvantageContext())
    assert torch.equal(rollouts.reward.nan_to_num(-99), before.nan_to_num(-99)), "the batch was changed in place"
    return advantages


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=2e-4, atol=2e-5)


# ---- what is declared ------------------------------------------------------------------------------------------------


def test_the_shipped_ones_are_found() -> None:
    assert {cls.__name__ for cls in ESTIMATORS} >= {
        "GroupMean",
        "LeaveOneOut",
        "OptimalBaseline",
        "OutcomeReshaped",
        "StepLevel",
    }
    assert {cls.__name__ for cls in OBJECTIVES} >= {"Clipped", "Reinforce"}


@each_class
def test_is_exported_and_documented(cls: type) -> None:
    """The short name resolves, the source is named, and each option has a line under `Args:`."""
    assert getattr(apportion.algorithms, cls.__name__) is cls
    assert cls.__name__ in apportion.algorithms.__all__
    assert cls.paper.strip()  # type: ignore[attr-defined]
    documented = inspect.getdoc(cls) or ""
    if "__init__" in vars(cls):
        for name in list(inspect.signature(cls).parameters):
            assert f"    {name}: " in documented.partition("Args:")[2], f"{cls.__name__} does not document {name}"


@each_class
def test_remembers_how_it_was_made(cls: type) -> None:
    """Made again from its description it has the same options."""
    described = describe(cls())
    module, _, name = described["class_path"].rpartition(".")
    again = getattr(importlib.import_module(module), name)(**described["init_args"])
    assert describe(again) == described
    assert set(described["init_args"]) == set(inspect.signature(cls).parameters if "__init__" in vars(cls) else ())


# ---- estimators ------------------------------------------------------------------------------------------------------


@each_estimator
@pytest.mark.parametrize("token_reward", [False, True])
def test_shape_support_and_no_gradient(
    cls, options: dict, token_reward: bool, random_rollouts: Build, random_signals
) -> None:
    """(N, T), finite, exactly 0 outside the action mask and on rows without a reward, also for the empty and the
    truncated completions that these batches hold; detached, whatever the signals carry; only declared signals read."""
    for seed in range(3):
        rollouts = random_rollouts(seed, missing=0.25, token_reward=token_reward)
        signals = {k: v.clone().requires_grad_() for k, v in random_signals(rollouts).items()}
        estimator = cls(**options)
        advantages = credit(estimator, rollouts, signals)
        assert advantages.shape == rollouts.action_mask.shape
        assert advantages.dtype == rollouts.reward.dtype
        assert advantages.isfinite().all()
        assert not advantages.requires_grad
        assert not advantages[~rollouts.action_mask].any()
        assert not advantages[~rollouts.reward_valid].any()
        assert advantages.any()


@each_estimator
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), token_reward=st.booleans())
def test_pitfall_07_rows_may_stand_in_any_order(
    cls, options: dict, seed: int, token_reward: bool, random_rollouts: Build, random_signals
) -> None:
    rollouts = random_rollouts(seed, sizes=(4, 1, 2, 5), missing=0.15, token_reward=token_reward)
    signals, estimator = random_signals(rollouts), cls(**options)
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(seed))
    shuffled = rollouts[order]
    expected = credit(estimator, rollouts, signals)[order]
    assert close(credit(estimator, shuffled, random_signals(shuffled)), expected)


@each_estimator
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_pitfall_07_group_ids_are_only_names(
    cls, options: dict, seed: int, random_rollouts: Build, random_signals
) -> None:
    rollouts = random_rollouts(seed)
    signals, estimator = random_signals(rollouts), cls(**options)
    renamed = rollouts.replace(group=rollouts.group * -1000 + 12345)
    assert close(credit(estimator, renamed, signals), credit(estimator, rollouts, signals))


@each_estimator
def test_other_groups_do_not_leak_in(cls, options: dict, random_rollouts: Build, random_signals) -> None:
    """Each group alone gets what it gets among others, unless the estimator pools over the batch and says so by using
    `context.reduce_sum`."""
    pooled = []
    estimator = cls(**options)
    rollouts = random_rollouts(5, missing=0.1, token_reward=True)
    signals = random_signals(rollouts)
    together = estimator(rollouts, Declared(estimator, signals), AdvantageContext(lambda x: pooled.append(x) or x))
    if pooled:
        pytest.skip(f"{cls.__name__} pools over the batch")
    for rows in rollouts.rows_by_group():
        alone = rollouts[rows]
        got = credit(estimator, alone, random_signals(alone))
        width = got.shape[1]
        assert close(got, together[rows, :width])


@each_estimator
def test_padding_changes_nothing(cls, options: dict, random_rollouts: Build, random_signals) -> None:
    rollouts = random_rollouts(6, token_reward=True)
    rows = rollouts.completion_mask.sum(1) < rollouts.completion_mask.shape[1]
    narrow = rollouts[rows]  # without the longest completion, and without the columns that only it used
    width = narrow.completion_mask.shape[1]
    padded: dict[str, Any] = {}
    for name in ("completion_ids", "completion_mask", "action_mask", "token_reward", "step_index"):
        value = getattr(narrow, name)
        filler = torch.full((len(narrow), 4), -1 if name == "step_index" else 0).to(value.dtype)
        padded[name] = torch.cat([value, filler], 1)
    wide = narrow.replace(**padded)
    estimator = cls(**options)
    got = credit(estimator, wide, random_signals(wide))
    assert close(got[:, :width], credit(estimator, narrow, random_signals(narrow)))
    assert not got[:, width:].any()


@each_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pitfall_09_constant_groups_as_declared(
    cls, options: dict, dtype: torch.dtype, random_rollouts: Build, random_signals
) -> None:
    """Exactly 0 for any constant, also one that no float holds exactly; else there is a counterexample."""
    estimator = cls(**options)
    seen = []
    for seed, constant in enumerate((0.95, 0.1, 1.0, 0.0, -1 / 3)):
        rollouts = random_rollouts(seed, sizes=(7, 3, 2, 6), dtype=dtype)
        rollouts = rollouts.replace(reward=torch.full_like(rollouts.reward, constant))
        seen.append(credit(estimator, rollouts, random_signals(rollouts)))
    if cls.zero_on_constant_group:
        assert not any(advantages.any() for advantages in seen)
    else:
        assert any(advantages.any() for advantages in seen), "declare zero_on_constant_group"


@each_estimator
def test_pitfall_08_a_missing_reward_is_not_zero(cls, options: dict, random_rollouts: Build, random_signals) -> None:
    """Rows without a reward change their siblings as little as if they had not been sampled, whatever number stands
    there."""
    estimator = cls(**options)
    rollouts = random_rollouts(8, missing=0.3, token_reward=True)
    assert 0 < rollouts.reward_valid.sum() < len(rollouts)
    advantages = credit(estimator, rollouts, random_signals(rollouts))
    known = rollouts[rollouts.reward_valid]
    width = known.action_mask.shape[1]
    assert close(credit(estimator, known, random_signals(known)), advantages[rollouts.reward_valid, :width])
    for garbage in (0.0, 1e9, float("inf"), float("nan")):
        other = rollouts.replace(reward=torch.where(rollouts.reward_valid, rollouts.reward, garbage))
        assert torch.equal(credit(estimator, other, random_signals(other)), advantages)


@each_estimator
def test_pitfall_08_fewer_than_two_known_rewards_give_zero(
    cls, options: dict, random_rollouts: Build, random_signals
) -> None:
    """For an estimator that compares: groups with one, and with no known reward, beside one with all."""
    if cls.smallest_group < 2:
        pytest.skip(f"{cls.__name__} works on single completions")
    rollouts = random_rollouts(9, sizes=(4, 3, 5), token_reward=True)
    valid = torch.ones(len(rollouts), dtype=torch.bool)
    first, second, third = rollouts.rows_by_group()
    valid[first[1:]] = valid[second] = False
    rollouts = rollouts.replace(reward_valid=valid)
    advantages = credit(cls(**options), rollouts, random_signals(rollouts))
    assert not advantages[first].any()
    assert not advantages[second].any()
    assert advantages[third].any()


@each_estimator
def test_pitfall_18_empty_completions_only(cls, options: dict, random_rollouts: Build, random_signals) -> None:
    rollouts = random_rollouts(10, token_reward=True)
    nothing = torch.zeros_like(rollouts.action_mask)
    rollouts = rollouts.replace(completion_mask=nothing, action_mask=nothing)
    advantages = credit(cls(**options), rollouts, random_signals(rollouts))
    assert torch.equal(advantages, torch.zeros_like(advantages))


@each_estimator
@pytest.mark.parametrize("token_reward", [False, True])
def test_float32_agrees_with_float64(
    cls, options: dict, token_reward: bool, random_rollouts: Build, random_signals
) -> None:
    for seed in range(3):
        fine = random_rollouts(seed, dtype=torch.float64, token_reward=token_reward)
        coarse = random_rollouts(seed, dtype=torch.float32, token_reward=token_reward)
        expected = credit(cls(**options), fine, random_signals(fine))
        got = credit(cls(**options), coarse, random_signals(coarse))
        assert (got.dtype, expected.dtype) == (torch.float32, torch.float64)
        assert close(got, expected)


# ---- objectives ------------------------------------------------------------------------------------------------------


def tokens(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp with gradient, logp_old near it, advantages, and a mask with an empty row."""
    draw = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(5, 6, generator=draw, dtype=torch.float64)
    old = logp + 0.5 * torch.randn(5, 6, generator=draw, dtype=torch.float64)
    advantages = torch.randn(5, 6, generator=draw, dtype=torch.float64)
    mask = torch.rand(5, 6, generator=draw) < 0.7
    mask[2] = False
    return logp.to(dtype).requires_grad_(), old.to(dtype), torch.where(mask, advantages, 0.0).to(dtype), mask


def loss_and_gradient(objective: PolicyObjective, logp: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    loss = objective(logp, *rest).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    return loss.detach(), gradient


@each_objective
def test_objective_shape_and_support(cls, options: dict) -> None:
    """(N, T), finite, exactly 0 outside the mask with no gradient there, though infinities and NaN stand there."""
    logp, old, advantages, mask = tokens(0)
    expected, slope = loss_and_gradient(cls(**options), logp, old, advantages, mask)
    assert expected.shape == mask.shape
    assert expected.isfinite().all()
    assert slope[mask].any()
    for garbage in (torch.nan, torch.inf, -torch.inf):
        dirty = [torch.where(mask, x.detach(), garbage) for x in (logp, old, advantages)]
        loss, gradient = loss_and_gradient(cls(**options), dirty[0].requires_grad_(), dirty[1], dirty[2], mask)
        assert torch.equal(loss, torch.where(mask, expected, 0.0))
        assert torch.equal(gradient, torch.where(mask, slope, 0.0))


@each_objective
def test_objective_gradient_flows_through_logp_only(cls, options: dict) -> None:
    logp, old, advantages, mask = tokens(1)
    old.requires_grad_()
    advantages.requires_grad_()
    cls(**options)(logp, old, advantages, mask).loss.sum().backward()
    assert logp.grad is not None
    assert old.grad is None
    assert advantages.grad is None


@each_objective
def test_objective_marks_the_tokens_without_gradient(cls, options: dict) -> None:
    logp, old, advantages, mask = tokens(2)
    output = cls(**options)(logp, old, advantages, mask)
    (gradient,) = torch.autograd.grad(output.loss.sum(), logp)
    clipped = torch.zeros_like(mask) if output.clipped is None else output.clipped
    assert clipped.dtype == torch.bool
    assert bool(clipped.any()) == (output.clipped is not None), "these ratios and advantages reach any clip"
    assert not gradient[clipped].any()
    assert not clipped[~mask].any()
    assert gradient[mask & ~clipped & (advantages != 0)].all()


@each_objective
def test_objective_may_be_cut_as_its_scope_says(cls, options: dict) -> None:
    """token: any column of any row alone has its loss. sequence: any row alone."""
    logp, old, advantages, mask = tokens(3)
    objective = cls(**options)
    loss, gradient = loss_and_gradient(objective, logp, old, advantages, mask)
    pieces = [(slice(i, i + 1), slice(None)) for i in range(len(mask))] if cls.scope != "group" else []
    if cls.scope == "token":
        pieces += [(slice(None), slice(t, t + 1)) for t in range(mask.shape[1])]
    for piece in pieces:
        part = logp.detach()[piece].requires_grad_()
        got, slope = loss_and_gradient(objective, part, old[piece], advantages[piece], mask[piece])
        assert torch.allclose(got, loss[piece])
        assert torch.allclose(slope, gradient[piece])


@each_objective
def test_objective_in_other_precisions(cls, options: dict) -> None:
    """float64 stays, float32 agrees with it, and bfloat16 log-probabilities are computed with in float32."""
    expected, _ = loss_and_gradient(cls(**options), *tokens(4))
    assert expected.dtype == torch.float64
    got, _ = loss_and_gradient(cls(**options), *tokens(4, torch.float32))
    assert got.dtype == torch.float32
    assert close(got, expected)
    half, _ = loss_and_gradient(cls(**options), *tokens(4, torch.bfloat16))
    assert half.dtype == torch.float32
    logp, old, advantages, mask = tokens(4, torch.bfloat16)
    widened, _ = loss_and_gradient(cls(**options), logp.detach().float().requires_grad_(), old, advantages, mask)
    assert torch.equal(half, widened)


@each_objective
def test_objective_checks_shapes_and_names_known_aggregations(cls, options: dict) -> None:
    logp, old, advantages, mask = tokens(5)
    for wrong in ((old[:, :1], advantages, mask), (old, advantages[:1], mask), (old, advantages, mask.long())):
        with pytest.raises(ValueError, match=r"\(N, T\)"):
            cls(**options)(logp, *wrong)
    assert cls.aggregations is None or cls.aggregations <= set(AGGREGATIONS)
