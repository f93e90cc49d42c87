"""A stand-in for PolicyGradient that makes up its rollouts: callbacks are tested without a language model."""

import time

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from apportion.data.batch import RolloutBatch
from apportion.data.budget import BudgetCounter
from apportion.modules.metrics import MeanWithError

GROUP, PROMPTS = 4, 2


class Record:
    def __init__(self, rollouts, seconds):
        self.rollouts, self.seconds = rollouts, seconds


class CharacterPolicy:
    def token_strings(self, ids):
        return [chr(i) for i in ids]


def make_rollouts(prompts=("1+2=", "3|4\n="), completions=("3;", "4", "", "12;"), reward=None, **fields):
    """`completions` for each prompt; rewards are 1 for the first of each group unless given."""
    texts = [c for _ in prompts for c in completions]
    members, n, width = len(completions), len(texts), max(1, *(len(t) for t in texts))
    ids, mask = torch.zeros(n, width, dtype=torch.long), torch.zeros(n, width, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor([ord(c) for c in text], dtype=torch.long)
        mask[row, : len(text)] = True
    index = torch.arange(len(prompts)).repeat_interleave(members)
    reward = torch.tensor([float(k % members == 0) for k in range(n)] if reward is None else reward)
    advantage = (reward - reward.nan_to_num().view(len(prompts), members).mean(1)[index]).nan_to_num()
    given = {
        "prompt_ids": torch.zeros(len(prompts), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(prompts), 1, dtype=torch.bool),
        "prompt_id": torch.arange(len(prompts)) + 10,
        "prompt_index": index,
        "group": index.clone(),
        "completion_ids": ids,
        "completion_mask": mask,
        "action_mask": mask,
        "reward": reward.nan_to_num(),
        "reward_valid": ~reward.isnan(),
        "truncated": torch.zeros(n, dtype=torch.bool),
        "in_loss": ~reward.isnan(),
        "policy_version": torch.zeros(n, dtype=torch.long),
        "reward_terms": {"accuracy": reward},
        "advantages": advantage[:, None] * mask,
        "prompt_texts": list(prompts),
        "completion_texts": texts,
    }
    return RolloutBatch(**{**given, **fields})


class Prompts(L.LightningDataModule):
    def __init__(self, batches=6):
        super().__init__()
        self.budget = BudgetCounter()
        self.batches = batches

    def loader(self, size):
        return DataLoader(torch.arange(size), batch_size=1, generator=torch.Generator())

    def train_dataloader(self):
        return self.loader(self.batches)

    def val_dataloader(self):
        return self.loader(3)

    def state_dict(self):
        return self.budget.state_dict()

    def load_state_dict(self, state_dict):
        self.budget.load_state_dict(state_dict)


class StandIn(L.LightningModule):
    """Draws from torch's global generator at each step, so that a callback that draws too changes the weights."""

    def __init__(self, pause=0.0):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters(
            {"_instantiator": "x", "estimator": {"class_path": "a.GroupMean", "init_args": {"scale": "none"}}, "k": 2}
        )
        self.layer = torch.nn.Linear(3, 1)
        self.policy = CharacterPolicy()
        self.update_epochs, self.minibatches = 1, 1
        self.rollout_step, self.record, self.phase, self.pause = 0, None, "", pause
        self.seconds = {}
        self.accuracy = MeanWithError()
        self.make_rollouts = make_rollouts

    def on_fit_start(self):
        self.phase = "warming up"
        time.sleep(self.pause)
        self.seconds = {"warm_start": 1.5}
        self.phase = ""

    def training_step(self, batch, batch_idx):
        self.phase = "sampling"
        time.sleep(self.pause)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(torch.randn(2, 3)).sum())
        optimizer.step()
        rollouts = self.make_rollouts()
        self.trainer.datamodule.budget.add(PROMPTS, len(rollouts), int(rollouts.lengths.sum()))
        self.rollout_step += 1
        self.record = Record(rollouts, {"rollout": 0.2, "score": 0.1, "update": 0.7})
        self.log_dict({"train/reward": float(rollouts.reward.mean())}, batch_size=1)
        self.phase = ""

    def validation_step(self, batch, batch_idx):
        self.phase = "validating"
        time.sleep(self.pause)
        right = batch.item() < 1 + min(self.rollout_step, 2)
        self.accuracy.update(torch.tensor([[float(right)]]))
        self.phase = ""

    def on_validation_epoch_end(self):
        mean, error = self.accuracy.compute()
        self.log_dict({"val/accuracy": mean, "val/accuracy_stderr": error}, batch_size=1)
        self.accuracy.reset()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["rollout_step"] = self.rollout_step

    def on_load_checkpoint(self, checkpoint):
        self.rollout_step = checkpoint["rollout_step"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def rollouts_of():
    return make_rollouts


@pytest.fixture
def stand_in():
    return StandIn


@pytest.fixture
def prompts():
    return Prompts


@pytest.fixture
def trainer_of(tmp_path):
    """A CPU trainer with a TensorBoard logger in tmp_path and the given callbacks."""

    def make(*callbacks, logger=True, **options):
        board = TensorBoardLogger(tmp_path, name="run", version=0, default_hp_metric=False) if logger else False
        given = {"max_epochs": 1, "log_every_n_steps": 1, "num_sanity_val_steps": 0, "enable_progress_bar": False}
        given |= {"enable_checkpointing": False, "enable_model_summary": False, "accelerator": "cpu"}
        return L.Trainer(logger=board, default_root_dir=tmp_path, callbacks=list(callbacks), **{**given, **options})

    return make


@pytest.fixture
def events(tmp_path):
    """The run's event file, read back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read():
        accumulator = EventAccumulator(str(tmp_path / "run" / "version_0"), size_guidance={"images": 0, "tensors": 0})
        accumulator.Reload()
        return accumulator

    return read
