# SPDX-License-Identifier: MIT
"""normfuse for PyTorch: drop-ins for torch's normalization layers on CPU and CUDA."""

from .functional import *  # noqa: F401,F403
from .modules import *  # noqa: F401,F403
from .convert import ConversionReport, convert, fold_batch_norm, revert  # noqa: F401
from .install import install, uninstall  # noqa: F401
