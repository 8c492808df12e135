# SPDX-License-Identifier: MIT
"""normfuse for PyTorch, as a package of the Kernel Hub: what normfuse.torch has, and `layers` for kernelize.
hub/build.py lays it beside the modules that it imports."""
from . import layers
from .torch import *  # noqa: F403
from .torch import __all__ as _names

__all__ = ["layers", *_names]
