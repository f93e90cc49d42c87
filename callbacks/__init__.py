"""Lightning callbacks, each with one job. They watch a PolicyGradient; none of them changes what is trained."""

from .budget import BudgetLimit
from .checkpoints import BestAndLast
from .credit_heatmap import CreditHeatmap
from .hyperparameters import Hyperparameters
from .predictions import PredictionWriter
from .progress import Progress
from .samples import Samples
from .scalar_layout import ScalarLayout
from .starting_point import StartingPoint
from .summary import FitSummary
from .throughput import Throughput

__all__ = [
    "BestAndLast",
    "BudgetLimit",
    "CreditHeatmap",
    "FitSummary",
    "Hyperparameters",
    "PredictionWriter",
    "Progress",
    "Samples",
    "ScalarLayout",
    "StartingPoint",
    "Throughput",
]
