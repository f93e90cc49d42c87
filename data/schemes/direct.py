"""Direct: R completions of each prompt, once."""

from collections.abc import Sequence

from ..batch import RolloutBatch
from ..sampler import Samples
from .base import RolloutRequest, RolloutScheme


class Direct(RolloutScheme):
    """Sample `group_size` completions of every prompt and verify them: the scheme of plain GRPO."""

    paper = "GRPO, arXiv 2402.03300"
    cost = "group_size completions a prompt"

    def collect(self, request: RolloutRequest) -> RolloutBatch:
        def finished(prompts: Sequence[int], samples: Samples) -> None:
            request.verify_ahead([request.examples[prompt] for prompt in prompts], samples)

        samples = request.sampler.sample(
            request.policy,
            request.prefixes,
            request.group_size,
            request.purpose,
            request.policy.limits(request.purpose),
            prompt_ids=[example["prompt_id"] for example in request.examples],
            step=request.step,
            finished=finished,
        )
        return request.verify(request.examples, request.prefixes, samples)
