"""apportion: credit assignment for reinforcement learning of language models, on PyTorch Lightning.

The sub-packages `apportion.data`, `apportion.algorithms`, `apportion.modules`, `apportion.callbacks` and
`apportion.configs` lie beside this folder in a checkout and inside it once installed.
"""

from pathlib import Path as _Path

__version__ = "0.1.0"

_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():  # a checkout: the sub-packages are this folder's siblings
    __path__.append(str(_root))
