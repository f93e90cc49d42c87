"""Options of a fit that takes a second: one rollout batch of four completions by a model of a few weights."""

TINY = [
    "--config=tasks/running_sums",
    "--data.task.max_terms=3",
    "--data.task.train_prompts=100",
    "--data.task.validation_prompts=4",
    "--config=algorithms/grpo",
    "--data.sampler=GenerateSampler",
    "--model.policy=Policy",
    "--model.policy.fresh={layers: 1, width: 16, heads: 2}",
    "--model.policy.max_completion_tokens=8",
    "--data.group_size=2",
    "--data.prompts_per_step=2",
    "--data.validation.prompts=4",
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=1",
]
