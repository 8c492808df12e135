# SPDX-License-Identifier: MIT
"""normfuse for PyTorch: drop-ins for torch's normalization layers on CPU and CUDA."""

from .._words import require as _require

_require("torch", "PyTorch", (2, 10), "normfuse.torch", "normfuse[torch]")

from . import _registries, functional as _functional, modules as _modules  # noqa: E402
from .convert import ConversionReport, convert, fold_batch_norm, fused, revert  # noqa: E402
from .functional import *  # noqa: E402, F403
from .install import install, uninstall  # noqa: E402
from .modules import *  # noqa: E402, F403
from .prepare import prepare  # noqa: E402

__all__ = ["ConversionReport", "convert", "fold_batch_norm", "fused", "install", "prepare", "revert", "uninstall",
           *_functional.__all__,
           *_modules.__all__]

_registries.add_classes()
