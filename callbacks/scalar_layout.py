"""Which curves stand together in TensorBoard's custom scalars."""

import lightning as L

from .access import tensorboard

# Charts by group. A tag is a regular expression that must match the whole name: TensorBoard itself takes prefixes.
LAYOUT: dict[str, dict[str, list[str]]] = {
    "learning": {
        "reward": [r"train/reward"],
        "validation accuracy": [r"val/(.+/)?accuracy"],
        "validation pass@k": [r"val/(.+/)?pass_at_\d+"],
        "reward terms": [r"train/reward_terms/.+"],
        "completion length": [r"train/completion_length"],
        "truncated and missing": [r"train/truncated", r"train/missing_rewards"],
        "loss of the warm start": [r"warmup/loss"],
    },
    "credit": {
        "spread of the reward": [r"train/reward_std"],
        "groups without credit": [r"credit/zero_variance_groups"],
        "rollouts with credit": [r"credit/effective_rollouts"],
        "effective rank": [r"rank/mean/r_eff(_null|_weights)?"],
        "share of the first direction": [r"rank/mean/top1"],
    },
    "entropy, KL and ratio": {
        "entropy (nats a token)": [r"train/entropy"],
        "KL to the reference": [r"train/kl"],
        "share of clipped ratios": [r"train/ratio_clipped"],
        "gradient norm": [r"train/grad_norm"],
        "loss": [r"train/loss"],
        "sampler against scorer": [r"sampler/logp_gap_(max|mean)"],
    },
    "time": {
        "seconds a rollout batch": [r"time/.+"],
        "tokens a second": [r"throughput/tokens_per_second"],
    },
    "budget": {
        "completions": [r"budget/completions"],
        "tokens": [r"budget/tokens"],
        "prompts": [r"budget/prompts"],
    },
}


class ScalarLayout(L.Callback):
    """Gives TensorBoard's custom-scalars page its groups: learning, credit, entropy with KL and ratio, time, budget."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        board = tensorboard(trainer)
        if board is None:
            return
        board.add_custom_scalars(
            {
                group: {chart: ["Multiline", [f"^{tag}$" for tag in tags]] for chart, tags in charts.items()}
                for group, charts in LAYOUT.items()
            }
        )
