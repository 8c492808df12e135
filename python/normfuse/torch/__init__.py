# SPDX-License-Identifier: MIT
"""normfuse for PyTorch: drop-ins for torch's normalization layers on CPU and CUDA."""

from . import _registries, functional as _functional, modules as _modules
from .convert import ConversionReport, convert, fold_batch_norm, fused, revert
from .functional import *  # noqa: F403
from .install import install, uninstall
from .modules import *  # noqa: F403
from .prepare import prepare

__all__ = ["ConversionReport", "convert", "fold_batch_norm", "fused", "install", "prepare", "revert", "uninstall", *_functional.__all__,
           *_modules.__all__]

_registries.add_classes()
