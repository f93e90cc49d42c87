"""Direct: R completions of each prompt, once."""

from ..batch import RolloutBatch
from .base import RolloutRequest, RolloutScheme


class Direct(RolloutScheme):
    """Sample `group_size` completions of every prompt and verify them: the scheme of plain GRPO."""

    paper = "GRPO, arXiv 2402.03300"
    cost = "group_size completions a prompt"

    def collect(self, request: RolloutRequest) -> RolloutBatch:
        samples = request.sampler.sample(
            request.policy,
            request.prefixes,
            request.group_size,
            request.purpose,
            request.policy.limits(request.purpose),
            prompt_ids=[example["prompt_id"] for example in request.examples],
            step=request.step,
        )
        return request.verify(request.examples, request.prefixes, samples)
