"""The KL divergence to a reference policy: three estimators, and the four places where they are of use.

Value and gradient of an estimator differ, so a form is known by the coefficient that it gives to the score
grad log pi_t (arXiv 2510.01555), with delta_t = pi_ref_t / pi_t and k1_t = -log delta_t:
k1_reward: sum of k1 from t on; k1_coefficient and k2_loss: k1_t; k3_loss: 1 - delta_t; k1 as a loss: 1.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ..data.configurable import Configurable
from ..data.errors import UsageError
from .options import check_choice, check_flag, check_range

KL_FORMS = {
    "k1_reward": "-beta k1 in the token reward, before the baseline: the exact gradient of the sequence's reverse KL",
    "k1_coefficient": "beta k1_t off each token's advantage: leaves out a token's effect on later ones",
    "k2_loss": "beta k2 added to the loss: the same gradient as k1_coefficient on-policy",
    "k3_loss": "beta k3 added to the loss (GRPO): the gradient of the forward KL, biased for the reverse one",
}


def k1(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """-log delta = log pi - log pi_ref. Unbiased for the reverse KL, either sign."""
    return logp - logp_ref


def k2(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """(log delta)^2 / 2. Biased, never negative; its gradient's coefficient is k1."""
    return 0.5 * (logp - logp_ref).square()


def k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """delta - 1 - log delta. Unbiased for the reverse KL, never negative; its gradient's coefficient is 1 - delta."""
    log_delta = logp_ref - logp
    return torch.expm1(log_delta) - log_delta


class KLPenalty(Configurable):
    """A penalty on the KL divergence to the policy that training started from (arXiv 2510.01555).

    Args:
        form: k1_reward, k1_coefficient, k2_loss or k3_loss. k1_reward is the exact gradient of the sequence's reverse
            KL; k1_coefficient and k2_loss leave out a token's effect on later ones; k3_loss (as in GRPO) follows the
            forward KL.
        coefficient: beta, the weight of the penalty; 0 turns it off.
        return_to_go: for k1_reward only: true, a token is charged for itself and later tokens; false, every token is
            charged for the whole completion. Same expectation, but more variance.
    """

    paper: ClassVar[str] = "arXiv 2510.01555; k3_loss: arXiv 2402.03300"

    def __init__(self, form: str = "k1_reward", coefficient: float = 0.04, return_to_go: bool = True) -> None:
        if form == "k1_loss":
            raise UsageError(
                "model.kl.form=k1_loss is refused: the expected gradient of k1 as a loss is 0 (score coefficient 1), "
                "so it adds noise and no regularisation; use k1_reward, k1_coefficient, k2_loss or k3_loss"
            )
        check_choice("model.kl.form", form, KL_FORMS)
        check_range("model.kl.coefficient", coefficient, 0.0)
        check_flag("model.kl.return_to_go", return_to_go)
        self.form = form
        self.coefficient = coefficient
        self.return_to_go = return_to_go

    @property
    def needs(self) -> frozenset[str]:
        """The signals that it reads: the reference's log-probabilities, and the behaviour policy's for the k1 forms."""
        return frozenset({"logp_ref", "logp_old"} if self.form.startswith("k1") else {"logp_ref"})

    def token_reward(self, logp_old: Tensor, logp_ref: Tensor, mask: Tensor) -> Tensor:
        """k1_reward: what to add to the token rewards, (N, T), 0 outside the mask.

        -beta k1_t at each token; with return_to_go=False the sum of them at the last token of the mask, so that it is
        in every token's return.
        """
        reward = -self._k1(logp_old, logp_ref, mask)
        if self.return_to_go:
            return reward
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        return torch.where(last, reward.sum(1, keepdim=True), 0.0)

    def advantage_penalty(self, logp_old: Tensor, logp_ref: Tensor, mask: Tensor) -> Tensor:
        """k1_coefficient: what to subtract from the advantages, beta k1_t, (N, T), 0 outside the mask. Being part of
        the advantage, it gets the importance ratio and the clip of the policy term."""
        return self._k1(logp_old, logp_ref, mask)

    def loss(self, logp: Tensor, logp_ref: Tensor, mask: Tensor) -> Tensor:
        """k2_loss, k3_loss: beta k2_t or beta k3_t to add to the policy loss, with gradient; (N, T), 0 outside the
        mask. Aggregate it like the policy loss, over the same denominator. Taken at the sampled tokens without an
        importance ratio, as in GRPO: after the first update of a rollout batch only k1_coefficient has one."""
        if self.form not in ("k2_loss", "k3_loss"):
            raise ValueError(f"form={self.form} is no loss term")
        estimator = k2 if self.form == "k2_loss" else k3
        return self.coefficient * estimator(*_masked(logp, logp_ref.detach(), mask))

    def estimate(self, logp: Tensor, logp_ref: Tensor, mask: Tensor) -> Tensor:
        """k3 of each token for logging, without coefficient and gradient; (N, T), 0 outside the mask. Pool it as a sum
        and a count."""
        return k3(*_masked(logp.detach(), logp_ref.detach(), mask))

    def _k1(self, logp_old: Tensor, logp_ref: Tensor, mask: Tensor) -> Tensor:
        return self.coefficient * k1(*_masked(logp_old.detach(), logp_ref.detach(), mask))


def _masked(logp: Tensor, logp_ref: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float32 at least and 0 outside the mask, so that every estimator is exactly 0 there, with no gradient."""
    if logp.ndim != 2 or not logp.shape == logp_ref.shape == mask.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"logp, logp_ref and mask must be (N, T) and mask bool; got {tuple(logp.shape)}, {tuple(logp_ref.shape)}, "
            f"{tuple(mask.shape)} {mask.dtype}"
        )
    dtype = torch.promote_types(torch.promote_types(logp.dtype, logp_ref.dtype), torch.float32)
    return torch.where(mask, logp.to(dtype), 0.0), torch.where(mask, logp_ref.to(dtype), 0.0)
