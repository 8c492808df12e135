# SPDX-License-Identifier: MIT
"""python -m normfuse info: what is installed, what it runs on, and how PyTorch's operators are bound."""
import argparse
import platform
import sys

import numpy

from . import __version__
from ._library import CompilerInformation, Information, call, library


def torch_binding() -> str:
    """Which binding of the PyTorch operators is active, and why not the other."""
    try:
        import torch
    except ImportError as error:
        return f"not installed ({error})"
    from .torch import _operators
    binding, reason = _operators.binding()
    return f"{torch.__version__}; operators through {binding}" + (f": {reason}" if reason else "")


def info() -> None:
    facts = Information()
    call(library.normfuse_info(facts))

    def text(words: bytes) -> str:
        return words.decode("utf-8", "replace")

    compiler = CompilerInformation()
    kernels = [] if library.normfuse_compiler_info(compiler) else [
        ("nvrtc", text(compiler.compiler)),
        ("kernels", f"{compiler.cache_kernels} in {text(compiler.cache)}" if not compiler.cache_problem else
         f"kept nowhere: {text(compiler.cache)} {text(compiler.cache_problem)}")]
    rows = [("version", __version__), ("library", str(library.path)), ("cpu", text(facts.cpu)),
            ("isa", f"{text(facts.isa)} (usable: {text(facts.isas_usable)}; built: {text(facts.isas_built)})"),
            ("caches", f"{facts.l1_bytes} {facts.l2_bytes} {facts.llc_bytes} bytes"), ("threads", str(facts.threads)),
            ("compiler", text(facts.compiler)), ("cuda", text(facts.cuda)), *kernels, ("python", platform.python_version()),
            ("numpy", numpy.__version__), ("torch", torch_binding())]
    for name, value in rows:
        print(f"{name:9} {value}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m normfuse", description=__doc__)
    parser.add_argument("command", choices=["info"], help="info: version, instruction sets, GPUs, PyTorch's binding")
    parser.parse_args()
    info()
    return 0


if __name__ == "__main__":
    sys.exit(main())
