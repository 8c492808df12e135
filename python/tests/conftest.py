# SPDX-License-Identifier: MIT
"""Tests run on the source tree's package unless NORMFUSE_INSTALLED says that an installed one is meant."""
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
if not os.environ.get("NORMFUSE_INSTALLED"):
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
