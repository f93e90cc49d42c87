"""From rollouts to advantages: the estimator, and the KL forms that are part of the reward or of the advantage."""

from ..algorithms.advantages.base import AdvantageContext, AdvantageEstimator
from ..algorithms.kl import KLPenalty
from ..data.batch import RolloutBatch
from .signals import Signals


def credit_needs(estimator: AdvantageEstimator, kl: KLPenalty | None, updates: int) -> frozenset[str]:
    """The signals that one step reads. After the first of several updates of a rollout batch the old log-probabilities
    are no longer the current ones, and are scored beforehand."""
    needs = estimator.needs | (kl.needs if kl is not None else frozenset())
    return needs | {"logp_old"} if updates > 1 else needs


def assign_credit(
    rollouts: RolloutBatch,
    estimator: AdvantageEstimator,
    kl: KLPenalty | None,
    signals: Signals,
    context: AdvantageContext,
) -> RolloutBatch:
    """The batch with `advantages`, and with the old and reference log-probabilities where `signals` has them.

    k1 in the reward comes before the baseline, as token rewards; the k1 coefficient comes after, off each token's
    advantage.
    """
    if kl is not None and kl.form == "k1_reward":
        penalty = kl.token_reward(signals["logp_old"], signals["logp_ref"], rollouts.action_mask)
        earned = penalty if rollouts.token_reward is None else rollouts.token_reward + penalty
        rollouts = rollouts.replace(token_reward=earned)
    advantages = estimator(rollouts, signals, context).detach()
    if kl is not None and kl.form == "k1_coefficient":
        penalty = kl.advantage_penalty(signals["logp_old"], signals["logp_ref"], rollouts.loss_mask)
        advantages = advantages - penalty
    scored = {name: signals[name] for name in ("logp_old", "logp_ref") if name in signals}
    return rollouts.replace(advantages=advantages, **scored)
