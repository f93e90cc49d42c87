"""Options of Lightning's Trainer that cannot be used here, or not together, refused before any work is done."""

import lightning as L

from ..data.errors import UsageError

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")


def check_precision(trainer: L.Trainer) -> None:
    if str(trainer.precision) not in PRECISIONS:
        raise UsageError(
            f"trainer.precision is '{trainer.precision}': give one of {', '.join(PRECISIONS)} "
            "(16-bit floats need loss scaling, which would hide a non-finite gradient)"
        )


def check_validation_interval(trainer: L.Trainer, batches: int) -> None:
    """Lightning would find a wrong interval only after the warm start.

    Args:
        batches: rollout batches in an epoch of the whole data.
    """
    every, limit = trainer.val_check_interval, trainer.limit_train_batches
    if not isinstance(every, int) or not trainer.limit_val_batches:
        return
    if every < 1:
        raise UsageError(f"trainer.val_check_interval is {every}: give a whole number of batches, at least 1")
    if trainer.check_val_every_n_epoch is None:
        return  # counted over the whole fit
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if every > batches:
        noun = "batch" if batches == 1 else "batches"
        raise UsageError(
            f"trainer.val_check_interval is {every}, but an epoch has {batches} {noun} (trainer.limit_train_batches is "
            f"{limit}): lower the interval, or set trainer.check_val_every_n_epoch to null to count over all epochs"
        )
