"""The command `apportion`: fit, validate, test and predict by the Lightning CLI, and list."""

import importlib.metadata
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

import apportion
import apportion.algorithms  # short class names are those of imported classes
from apportion.callbacks import (
    BestAndLast,
    BudgetLimit,
    CreditHeatmap,
    FitSummary,
    Hyperparameters,
    PredictionWriter,
    Progress,
    Samples,
    ScalarLayout,
    StartingPoint,
    Throughput,
)
from apportion.data import RolloutDataModule, RunError, UsageError
from apportion.data.errors import nearest
from apportion.modules import PolicyGradient
from apportion.modules.checkpoint import check_file

from .listing import list_command
from .messages import one_line
from .nulls import refuse_nulls
from .overlays import Overlay, configs_first
from .plan import plan

HELP = """\
usage: apportion COMMAND [OPTIONS]

Reinforcement learning of language models, seen through credit assignment.

commands:
  fit        train a policy
  validate   measure a policy on the validation prompts
  test       the same, logged under test/
  predict    write completions with verdicts and per-token advantages as JSON lines
  list       every method: name, paper, needs, cost   (--json)

A run is put together from overlays; a name like tasks/running_sums is a file that comes with apportion. Options on the
command line win over overlays, and later overlays over earlier ones:

  apportion fit --config experiments/demo
  apportion fit --config tasks/running_sums --config models/tiny --config algorithms/rloo --data.group_size 4
  apportion predict --config experiments/demo --ckpt_path last     (or best, or a file; fit goes on from it)

apportion COMMAND --help shows every option; --model.estimator.help=GroupMean those of one class.
"""
RUN_COMMANDS = ("fit", "validate", "test", "predict")
NOT_LIGHTNINGS = {  # trainer options without use in manual optimisation: the harmless value, and what to set instead
    "gradient_clip_val": (None, "model.clip_gradient_norm"),
    "accumulate_grad_batches": (1, "data.prompts_per_step (model.micro_batch_tokens is what bounds the memory)"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, 1 for a failure while running, 2 for a request that is wrong, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if args is None else args)
    try:
        _dispatch(words)
    except UsageError as error:
        return _failed(error, 2)
    except RunError as error:
        return _failed(error, 1)
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning's way to end
            return 130
        if isinstance(stop.code, str):
            return _failed(stop, 1)
        return stop.code or 0
    return 0


def _failed(error: BaseException, status: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
    elif words[0] == "--version":
        print(f"apportion {apportion.__version__}")
    elif words[0] in (*RUN_COMMANDS, "list"):
        _quiet()
        if str(Path.cwd()) not in sys.path:  # a class or reward function of the user's own may lie here
            sys.path.append(str(Path.cwd()))
        load_plugins()
        list_command(words[1:]) if words[0] == "list" else Command(words)
    else:
        raise UsageError(f"there is no command '{words[0]}': {nearest(words[0], [*RUN_COMMANDS, 'list'])}")


def load_plugins() -> None:
    """Import what other packages registered under the entry-point group `apportion.plugins`."""
    for entry in importlib.metadata.entry_points(group="apportion.plugins"):
        try:
            entry.load()
        except Exception as error:
            where = f"the plugin '{entry.name}' ({entry.value})"
            raise UsageError(f"{where} cannot be imported ({error!r}): mend or uninstall it") from error


def _quiet() -> None:
    """What Lightning and PyTorch say about themselves, and nobody can act on."""
    for logger in ("pytorch.utilities.rank_zero", "fabric.utilities.rank_zero", "fabric.utilities.seed"):
        logging.getLogger(f"lightning.{logger}").setLevel(logging.WARNING)
    for message in (
        "does not have many workers",
        "isinstance\\(treespec",
        "args parameter is intended",
        "Be aware that when using `ckpt_path`",  # validating needs none of a fit's callbacks
        "You're resuming from a checkpoint that ended before",  # the data module's own state goes on
        "Found .* in eval mode",  # the frozen reference
    ):
        warnings.filterwarnings("ignore", message=f"\\s*.*{message}")
    for logger in ("datasets.packaged_modules.json.json", "huggingface_hub.utils._http"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # what they raise is reported in one line
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


class Parser(LightningArgumentParser):
    """A parser without abbreviated options, whose errors are one line."""

    def __init__(self, *args: Any, **options: Any) -> None:
        usage = "apportion fit|validate|test|predict [--config OVERLAY]... [--OPTION VALUE]..."
        super().__init__(*args, **{**options, "allow_abbrev": False, "usage": usage})

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, *args: Any, **options: Any) -> Any:
        if nested_key is None:  # a parser of one class's options, which errors are to name
            self.owner = theclass
        return super().add_class_arguments(theclass, nested_key, *args, **options)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        raise UsageError(one_line(message, self))


class SaveConfig(SaveConfigCallback):
    """config.yaml in the run's folder, every value resolved, and the same as a text in TensorBoard."""

    def save_config(self, trainer: Any, pl_module: Any, stage: Any) -> None:
        text = self.parser.dump(self.config, skip_unset=False)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("config", f"```yaml\n{text}\n```")


class Command(LightningCLI):
    """fit, validate, test and predict."""

    def __init__(self, words: list[str]) -> None:
        self.command = words[0]
        super().__init__(
            PolicyGradient,
            RolloutDataModule,
            args=[words[0], *configs_first(words[1:])],
            parser_class=Parser,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_callback=SaveConfig if self.command == "fit" else None,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={
                "callbacks": default_callbacks(self.command),
                "log_every_n_steps": 1,
                "num_sanity_val_steps": -1,  # the whole validation before the first step: where the curves start
                "use_distributed_sampler": False,
                "enable_model_summary": False,
            },
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the one in question: most of the time until a run starts goes into building parsers."""
        return {self.command: LightningCLI.subcommands()[self.command]}

    def init_parser(self, **options: Any) -> LightningArgumentParser:
        parser = self.parser_class(**{"dump_header": [f"apportion {apportion.__version__}"], **options})
        parser.add_argument(
            "-c",
            "--config",
            action=Overlay,
            help="an overlay: a YAML file, or the name of one that comes with apportion",
        )
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", type=str, default="run", help="the run lies in runs/<name>/version_k")
        if self.command == "fit":
            parser.add_argument(
                "--dry-run",
                action="store_true",
                help="say what the fit would do and what a rollout batch costs, and stop",
            )
        parser.add_lightning_class_args(BudgetLimit, "budget")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        config = self.config[self.command]
        sections = {PolicyGradient: "model", RolloutDataModule: "data", BudgetLimit: "budget"}
        refuse_nulls({cls: (name, config[name]) for cls, name in sections.items()})
        if not isinstance(config.seed_everything, bool) and config.seed_everything < 0:
            raise UsageError(f"seed_everything is {config.seed_everything}: give a whole number of at least 0")
        folder = Path(config.name)
        if folder == Path() or folder.is_absolute() or ".." in folder.parts:
            raise UsageError(f"name is '{config.name}': give the name of a folder below runs/")

    def before_fit(self) -> None:
        if self.config.fit.dry_run:
            print("\n".join(plan(self.model, self.datamodule, self.trainer)))
            raise SystemExit(0)

    def _parse_ckpt_path(self) -> None:
        """The configuration decides, never the checkpoint's hyper-parameters: a changed option must not be ignored.
        'last' and 'best' are those of the newest run of this name."""
        config = self.config[self.command]
        path = config.get("ckpt_path")
        if path in ("last", "best"):
            runs = runs_folder(config.trainer.default_root_dir) / config.name
            found = sorted(runs.glob(f"version_*/checkpoints/{path}.ckpt"), key=lambda file: file.stat().st_mtime)
            if not found:
                raise UsageError(f"ckpt_path is '{path}', but no run in {runs} has a checkpoint yet: give a .ckpt file")
            config.ckpt_path = str(found[-1])
        elif path is not None:
            check_file(path)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except Exception as error:
            if (request := cause(error)) is not None:  # jsonargparse wraps what a constructor says
                raise request from error
            raise
        self.model.resolve_micro_batch_tokens(self.trainer.strategy.root_device)
        config = self.config[self.command]
        config.model.micro_batch_tokens = self.model.micro_batch_tokens  # config.yaml holds what was resolved

    def instantiate_trainer(self, **options: Any) -> Any:
        given = self._get(self.config_init, "trainer")
        for name, (harmless, instead) in NOT_LIGHTNINGS.items():
            if given.get(name) not in (None, harmless):
                raise UsageError(f"trainer.{name} is {given[name]}, which is not used here: set {instead} instead")
        if given.get("logger") in (None, True):
            name = self._get(self.config_init, "name")
            root = runs_folder(given.get("default_root_dir"))
            options["logger"] = TensorBoardLogger(root, name=name, default_hp_metric=False)
        if given.get("enable_progress_bar") is False:
            watching = self.trainer_defaults["callbacks"]
            self.trainer_defaults["callbacks"] = [
                callback for callback in watching if not isinstance(callback, Progress)
            ]
        try:
            return super().instantiate_trainer(**options)
        except (MisconfigurationException, ValueError) as error:
            raise UsageError(f"trainer: {error} (see --help, the options that begin with --trainer)") from error


def cause(error: BaseException | None) -> UsageError | RunError | None:
    """The UsageError or RunError that an exception was made of, if any."""
    while error is not None and not isinstance(error, UsageError | RunError):
        error = error.__cause__ or error.__context__
    return error


def runs_folder(root: str | None) -> Path:
    """Where runs lie: below trainer.default_root_dir, the current folder unless given."""
    return Path(root or ".") / "runs"


def default_callbacks(command: str) -> list[Callback]:
    """What watches a run unless told otherwise; `--trainer.callbacks+=…` adds to it."""
    if command == "fit":
        return [
            Progress(),
            StartingPoint(),
            Throughput(),
            Samples(),
            CreditHeatmap(),
            ScalarLayout(),
            Hyperparameters(),
            BestAndLast(),
            FitSummary(),
        ]
    return [Progress(), PredictionWriter()] if command == "predict" else [Progress()]
