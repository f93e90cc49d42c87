"""The first point of the validation curves."""

import lightning as L


class StartingPoint(L.Callback):
    """Puts the validation before the first step into the logs, at x = 0: Lightning itself throws its numbers away.

    It is the one that trainer.num_sanity_val_steps=-1 asks for; a shorter one is a test of the code, not an accuracy,
    and is not logged. Nothing is logged where a run is resumed.
    """

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.num_sanity_val_batches != trainer.num_val_batches or trainer.global_step > 0:
            return
        metrics = {tag: float(value) for tag, value in trainer.callback_metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=0)
