# SPDX-License-Identifier: MIT
"""Words of this package's messages: which version of another package is needed, and what a word was most likely meant
to be. Nothing but the standard library."""
from __future__ import annotations

import importlib
import re
from typing import Any, Iterable, Optional, Tuple

# Names of these in other libraries.
_OTHER_NAMES = {"swish": "silu", "linear": "identity", "none": "identity", "channelsfirst": "nchw",
                "channelslast": "nhwc",
                "nchw": "nchw", "nhwc": "nhwc", "rms": "mean_square", "layer": "mean_and_variance"}


def require(package: str, title: str, oldest: Tuple[int, int], user: str, extra: str) -> Any:
    """The package, imported. ImportError in one sentence where it is missing or older than `oldest`. `user` is the part
    of normfuse that needs it, `extra` what pip calls what brings it."""
    wanted = f"{user} needs {title} {'.'.join(map(str, oldest))} or newer"
    install = f"pip install '{extra}'"
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and something that it needs is not
            raise
        raise ModuleNotFoundError(f"{wanted}: {install}", name=package) from None
    version = str(getattr(module, "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < oldest:
        raise ImportError(f"{wanted}, and this is {version}: {install}", name=package)
    return module


def meant(word: Any, names: Iterable[Optional[str]]) -> Optional[str]:
    """The name that a word was most likely meant to be: the same but for capitals and underscores, what another library
    calls it, or the nearest one."""
    if not isinstance(word, str):
        return None
    known = {name.replace("_", ""): name for name in names if name}
    plain = word.lower().replace("_", "").replace("-", "").replace(" ", "")
    other = _OTHER_NAMES.get(plain, "").replace("_", "")
    if plain in known or other in known:
        return known.get(plain) or known[other]
    from difflib import get_close_matches
    nearest = get_close_matches(plain, known, 1, 0.7)
    return known[nearest[0]] if nearest else None


def did_you_mean(word: Any, names: Iterable[Optional[str]]) -> str:
    """The end of a message."""
    name = meant(word, names)
    return "" if name is None else f", did you mean {name!r}?"
