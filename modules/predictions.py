"""What `apportion predict` writes of a rollout batch."""

from typing import Any

from ..data.batch import RolloutBatch
from .policy import Policy


def prediction_rows(rollouts: RolloutBatch, policy: Policy) -> list[dict[str, Any]]:
    """One plain dict a completion: prompt_id, prompt, completion, token ids and strings, reward, advantages, …"""
    assert rollouts.advantages is not None
    rows = []
    for row in range(len(rollouts)):
        mask = rollouts.completion_mask[row]
        ids = rollouts.completion_ids[row, mask].tolist()
        valid = bool(rollouts.reward_valid[row])
        prompt = int(rollouts.prompt_index[row])
        rows.append(
            {
                "prompt_id": int(rollouts.prompt_id[prompt]),
                "member": int(rollouts.member[row]) if rollouts.member is not None else row,
                "prompt": rollouts.prompt_texts[prompt],
                "completion": rollouts.completion_texts[row],
                "completion_ids": ids,
                "tokens": policy.token_strings(ids),
                "reward": float(rollouts.reward[row]) if valid else None,
                "reward_terms": {name: float(values[row]) for name, values in rollouts.reward_terms.items()},
                "truncated": bool(rollouts.truncated[row]),
                "advantages": [float(a) for a in rollouts.advantages[row, mask]],
            }
        )
    return rows
