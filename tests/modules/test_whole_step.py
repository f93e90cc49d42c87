"""The gradient of a whole step against an independent float64 implementation: plain loops, one completion at a time.

Nothing of `apportion.algorithms` is used by the reference.
"""

import itertools
import math

import pytest
import torch

from apportion.algorithms import (
    Clipped,
    GroupMean,
    KLPenalty,
    LeaveOneOut,
    OptimalBaseline,
    OutcomeReshaped,
    Reinforce,
    StepLevel,
)
from apportion.data.sampler import seed_of
from apportion.modules.policy import Policy
from apportion.modules.reporting import Totals
from tests.modules.whole_step import (
    ANSWERS,
    BETA,
    COMPLETIONS,
    ENTROPY,
    LENGTH,
    PROMPT_OF,
    PROMPTS,
    REWARDS,
    STEP_REWARDS,
    STEPS,
    build_batch,
    build_module,
    build_policy,
)

# ---- the reference: loops over completions and tokens ------------------------------------------------------------


def logits_of(policy: Policy, i: int, embeddings=None) -> torch.Tensor:
    """(T_i, V) logits at the sampling temperature, from a forward pass of this completion alone."""
    prompt, completion = PROMPTS[PROMPT_OF[i]], COMPLETIONS[i]
    if embeddings is None:
        out = policy.model(input_ids=torch.tensor([prompt + completion])).logits[0]
    else:
        out = policy.model(inputs_embeds=embeddings[None]).logits[0]
    return out[len(prompt) - 1 : len(prompt) - 1 + len(completion)].double() / 0.7


def logp_and_entropy(policy: Policy, i: int):
    logp, entropy = [], []
    for t, row in enumerate(logits_of(policy, i) if COMPLETIONS[i] else []):
        log_probs = row - torch.logsumexp(row, 0)
        logp.append(log_probs[COMPLETIONS[i][t]])
        entropy.append(-(log_probs.exp() * log_probs).sum())
    return logp, entropy


def score_norm(policy: Policy, i: int) -> float:
    logp, _ = logp_and_entropy(policy, i)
    if not logp:
        return 0.0
    gradients = torch.autograd.grad(sum(logp), list(policy.parameters()))
    return sum(float((g.double() ** 2).sum()) for g in gradients)


def influence(policy: Policy, i: int) -> list[float]:
    """OAR-G's score of each reasoning token."""
    if ANSWERS[i] is None:
        return []
    start, stop = ANSWERS[i]
    prompt, completion = PROMPTS[PROMPT_OF[i]], COMPLETIONS[i]
    clean = policy.model.get_input_embeddings()(torch.tensor(prompt + completion)).detach()
    generator = torch.Generator().manual_seed(
        seed_of(17, 0, 40 + PROMPT_OF[i], "answer_influence", 0, [0, 1, 2, 3, 0, 1, 2][i])
    )
    noise = 1e-3 * torch.randn(len(completion), clean.shape[1], generator=generator)
    noisy = clean.clone()
    for t in range(start):
        noisy[len(prompt) + t] += noise[t].to(clean)
    noisy.requires_grad_()
    p = torch.log_softmax(logits_of(policy, i, clean)[start:stop].mean(0), 0).detach()
    q = torch.log_softmax(logits_of(policy, i, noisy)[start:stop].mean(0), 0)
    (g,) = torch.autograd.grad((p.exp() * (p - q)).sum(), noisy)
    return [abs(float((g[len(prompt) + t] * clean[len(prompt) + t]).sum())) for t in range(start)]


def reshape(s: list[float], q: float = 0.25, beta: float = 1.0) -> list[float]:
    u = [math.log1p(x) for x in s]
    if not u or max(u) == min(u):
        return [1.0] * len(u)
    u = [(x - min(u)) / (max(u) - min(u)) for x in u]
    tau = float(torch.quantile(torch.tensor(u, dtype=torch.float64), q))
    w = [max(x / tau, 0.1) if x < tau else (1 + beta * (x - tau) / (1 - tau) if tau < 1 else 1.0) for x in u]
    return [x * len(w) / sum(w) for x in w]


def std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))


def reference_advantages(policy, name: str, token_reward: list[list[float]], scores) -> list[list[float]]:
    lengths = [len(c) for c in COMPLETIONS]
    total = [REWARDS[i] + sum(token_reward[i]) for i in range(7)]
    advantages = [[0.0] * n for n in lengths]
    for prompt in (0, 1):
        members = [i for i in range(7) if PROMPT_OF[i] == prompt and not math.isnan(REWARDS[i])]
        returns = [total[i] for i in members]
        if name == "step_level":
            rewards = {}
            for i in members:
                rewards[i] = list(STEP_REWARDS[i])
                for t in range(lengths[i]):
                    rewards[i][STEPS[i][t]] += token_reward[i][t]
            pool = [x for i in members for x in rewards[i]]
            mean, scale = sum(pool) / len(pool), std(pool) + 1e-6
            for i in members:
                for t in range(lengths[i]):
                    advantages[i][t] = sum((x - mean) / scale for x in rewards[i][STEPS[i][t] :])
            continue
        for i in members:
            others = [j for j in members if j != i]
            scale = 1.0
            if name in ("group_mean", "group_mean_std", "oar"):
                baseline = sum(returns) / len(returns)
                scale = std(returns) + 1e-6 if name == "group_mean_std" else 1.0
            elif name == "leave_one_out":
                baseline = sum(total[j] for j in others) / len(others)
            else:
                if name == "optimal_exact":
                    w = {j: score_norm(policy, j) for j in members}
                elif name == "optimal_length":
                    w = {j: float(lengths[j]) for j in members}
                else:
                    w = {}
                    for j in members:
                        w[j] = 0.0
                        for t, row in enumerate(logits_of(policy, j) if lengths[j] else []):
                            p = torch.softmax(row, 0)
                            one_hot = torch.zeros_like(p)
                            one_hot[COMPLETIONS[j][t]] = 1
                            w[j] += float(((one_hot - p) ** 2).sum())
                over = others if name == "optimal_logit_norm_loo" else members
                baseline = sum(w[j] * total[j] for j in over) / sum(w[j] for j in over)
            for t in range(lengths[i]):
                to_go = REWARDS[i] + sum(token_reward[i][t:])
                advantages[i][t] = (to_go - baseline) / scale
            if name == "oar":
                for t, w in enumerate(reshape(influence(policy, i) if scores is None else scores[i])):
                    advantages[i][t] *= w
    return advantages


def reference_gradient(
    policy: Policy, reference, name, objective: str, form: str | None, aggregation: str, entropy: float, old, scores
) -> list[torch.Tensor]:
    rows = [logp_and_entropy(policy, i) for i in range(7)]
    with torch.no_grad():
        ref = [logp_and_entropy(reference, i)[0] for i in range(7)] if reference is not None else None
    k1 = [
        [float((rows[i][0][t] - ref[i][t]).detach()) if ref else 0.0 for t in range(len(COMPLETIONS[i]))]
        for i in range(7)
    ]
    token_reward = [[-BETA * x if form == "k1_reward" else 0.0 for x in row] for row in k1]
    advantages = reference_advantages(policy, name, token_reward, scores)
    in_loss = [i for i in range(7) if not math.isnan(REWARDS[i]) and COMPLETIONS[i]]
    tokens = sum(len(COMPLETIONS[i]) for i in in_loss)
    loss = torch.zeros((), dtype=torch.float64)
    for i in in_loss:
        for t in range(len(COMPLETIONS[i])):
            logp, h = rows[i][0][t], rows[i][1][t]
            a = advantages[i][t]
            if form == "k1_coefficient":
                a -= BETA * k1[i][t]
            if objective == "reinforce":
                term = -a * logp
            else:
                ratio = torch.exp(logp - (logp.detach() if old is None else old[i][t]))
                term = -torch.minimum(ratio * a, torch.clamp(ratio, 0.8, 1.3) * a)
                if a < 0:
                    term = torch.minimum(term, torch.tensor(-3.0 * a, dtype=torch.float64))
            if form in ("k2_loss", "k3_loss"):
                d = ref[i][t] - logp
                term = term + BETA * (d**2 / 2 if form == "k2_loss" else torch.exp(d) - d - 1)
            term = term - entropy * h
            weight = {
                "token_mean": 1 / tokens,
                "sequence_mean": 1 / (len(in_loss) * len(COMPLETIONS[i])),
                "sequence_sum": 1 / len(in_loss),
                "constant_length": 1 / (len(in_loss) * LENGTH),
            }[aggregation]
            loss = loss + term * weight
    return [g.double() for g in torch.autograd.grad(loss, list(policy.parameters()))]


# ---- the comparison ----------------------------------------------------------------------------------------------

ESTIMATORS = {
    "group_mean": lambda: GroupMean(scale="none"),
    "group_mean_std": lambda: GroupMean(scale="std"),
    "leave_one_out": LeaveOneOut,
    "optimal_exact": lambda: OptimalBaseline(weight="exact"),
    "optimal_logit_norm_loo": lambda: OptimalBaseline(weight="logit_norm", leave_one_out=True),
    "optimal_length": lambda: OptimalBaseline(weight="length"),
    "oar": lambda: OutcomeReshaped(scale="none"),
    "step_level": StepLevel,
}
OBJECTIVES = {
    "reinforce": Reinforce,
    "clipped": lambda: Clipped(epsilon_low=0.2, epsilon_high=0.3, dual_clip=3.0),
}
FORMS = [None, "k1_reward", "k1_coefficient", "k2_loss", "k3_loss"]
AGGREGATION_NAMES = ["token_mean", "sequence_mean", "sequence_sum", "constant_length"]


def our_gradient(dtype: str, name: str, objective: str, form: str | None, aggregation: str, entropy: float, off: float):
    """Our gradient and the reference's float64 one. off > 0: old log-probabilities that far from the current ones."""
    policy = build_policy(dtype)
    kl = KLPenalty(form=form, coefficient=BETA) if form else None
    module = build_module(policy, ESTIMATORS[name](), OBJECTIVES[objective](), kl, aggregation, entropy)
    batch = module.assign_credit(build_batch(torch.float64 if dtype == "float64" else torch.float32))
    exact = build_policy("float64")
    exact.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in policy.state_dict().items()})
    reference = None
    if module.reference is not None:
        reference = build_policy("float64")
        reference.load_state_dict({k: v.double() for k, v in module.reference.state_dict().items()})
    old = None
    if off:
        with torch.no_grad():
            now = [logp_and_entropy(exact, i)[0] for i in range(7)]
        old = [[float(x) + off * ((3 * i + 5 * t) % 7 - 3) for t, x in enumerate(row)] for i, row in enumerate(now)]
        logp_old = torch.zeros(batch.completion_ids.shape, dtype=torch.float64)
        for i, row in enumerate(old):
            logp_old[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        batch = batch.replace(logp_old=logp_old.to(getattr(torch, dtype)))
        module.policy.version = 1
    scores = None
    if name == "oar" and dtype == "float32":
        # The score is the gradient of a KL between two beliefs that noise of 1e-3 moved apart: in float32 it is good to
        # a tenth of the largest (next test). What is made of a given score is exact, and compared here.
        found = module.signals(build_batch(torch.float32))["answer_influence"]
        scores = [found[i, : (ANSWERS[i] or (0, 0))[0]].tolist() for i in range(7)]
    assert module.accumulate_gradients(batch, Totals())
    ours = [p.grad.double() for p in policy.parameters()]
    return ours, reference_gradient(exact, reference, name, objective, form, aggregation, entropy, old, scores)


def relative_difference(ours, theirs) -> float:
    ours, theirs = torch.cat([g.flatten() for g in ours]), torch.cat([g.flatten() for g in theirs])
    assert theirs.norm() > 1e-4
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 0.2)])
def test_answer_influence(dtype, tolerance):
    policy = build_policy(dtype)
    module = build_module(policy, OutcomeReshaped(), Reinforce(), None, "token_mean")
    found = module.signals(build_batch(getattr(torch, dtype)))["answer_influence"]
    for i, answer in enumerate(ANSWERS):
        expected = torch.zeros(found.shape[1], dtype=torch.float64)
        if answer is not None:
            expected[: answer[0]] = torch.tensor(influence(policy, i), dtype=torch.float64)
            assert expected.sum() > 0
        torch.testing.assert_close(found[i].double(), expected, rtol=0, atol=tolerance * float(expected.max()))


def test_16_bits_do_not_drown_the_answer_influence():
    rounded = build_policy("bfloat16")
    exact = build_policy("float32")
    exact.load_state_dict(rounded.state_dict())
    before = [p.data_ptr() for p in rounded.parameters()]
    scores = {}
    for name, policy, autocast in (("exact", exact, False), ("rounded", rounded, False), ("mixed", exact, True)):
        module = build_module(policy, OutcomeReshaped(), Reinforce(), None, "token_mean")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            scores[name] = module.signals(build_batch(torch.float32))["answer_influence"]
    assert scores["exact"].sum() > 0
    assert torch.equal(scores["rounded"], scores["exact"])
    assert torch.equal(scores["mixed"], scores["exact"])
    assert [p.data_ptr() for p in rounded.parameters()] == before


ALL = [
    (*names, AGGREGATION_NAMES[k % 4]) for k, names in enumerate(itertools.product(ESTIMATORS, OBJECTIVES, FORMS))
]  # every estimator with every objective and form
PAIRS = ALL[::7]


def test_the_short_list_covers_every_name():
    for names, position in ((ESTIMATORS, 0), (OBJECTIVES, 1), (FORMS, 2), (AGGREGATION_NAMES, 3)):
        assert {case[position] for case in PAIRS} == set(names)


@pytest.mark.parametrize(("name", "objective", "form", "aggregation"), PAIRS)
def test_gradient_of_a_step(name, objective, form, aggregation):
    ours, theirs = our_gradient("float64", name, objective, form, aggregation, ENTROPY, off=0.06)
    assert relative_difference(ours, theirs) < 1e-8
    ours, theirs = our_gradient("float32", name, objective, form, aggregation, 0.0, off=0.0)
    assert relative_difference(ours, theirs) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "objective", "form", "aggregation"), ALL)
def test_gradient_of_a_step_in_every_combination(name, objective, form, aggregation):
    for off, entropy in ((0.0, 0.0), (0.06, ENTROPY)):
        ours, theirs = our_gradient("float64", name, objective, form, aggregation, entropy, off)
        assert relative_difference(ours, theirs) < 1e-8
    ours, theirs = our_gradient("float32", name, objective, form, aggregation, 0.0, 0.0)
    assert relative_difference(ours, theirs) < 1e-5
