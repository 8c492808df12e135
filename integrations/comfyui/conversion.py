# SPDX-License-Identifier: MIT
"""The work of the nodes: a converted model as object patches of ComfyUI's ModelPatcher.

convert changes classes of modules, and nothing else that ComfyUI's models need. So each change is one object patch, of
`<path>.__class__`: ComfyUI sets the classes when it loads the model, and puts the old ones back when it unloads it or
loads a model without these patches. The model that the node was given stays as it is.
"""
from __future__ import annotations

import copy
import logging
from typing import Any

import normfuse.torch as nft
from torch import nn

# Norms over the channels of each position: those that convert leaves are counted in the report.
OVER_CHANNELS = {("comfy.ldm.wan.vae", "RMS_norm"), ("comfy.ldm.wan.vae2_2", "RMS_norm"),
                 ("comfy.ldm.lightricks.vae.pixel_norm", "PixelNorm")}


def _marks(module: nn.Module) -> dict[str, Any]:
    """The entries that convert keeps in a module beside its class."""
    return {name: value for name, value in module.__dict__.items() if name.startswith("_normfuse_")}


def converted_classes(model: nn.Module) -> tuple[dict[str, type], str]:
    """The classes that convert gives the modules, by their paths, and its report. The model is afterwards as it was."""
    before = {module: (type(module), _marks(module)) for module in model.modules()}
    try:
        report = str(nft.convert(model))
        return {path: type(module) for path, module in model.named_modules()}, report
    finally:
        for module, (kind, marks) in before.items():
            for name in _marks(module):
                del module.__dict__[name]

            module.__dict__.update(marks)
            object.__setattr__(module, "__class__", kind)


def _patched(patcher: Any, prefix: str) -> tuple[Any, str]:
    """A clone of the ModelPatcher with the patches of the part of its model at `prefix`."""
    part = patcher.model.get_submodule(prefix)
    classes, report = converted_classes(part)
    clone, left = patcher.clone(), 0
    for path, module in part.named_modules():
        key = ".".join(filter(None, (prefix, path, "__class__")))
        own = patcher.object_patches_backup.get(key, type(module))  # the model may be loaded with such patches
        if classes[path] is not own:
            clone.add_object_patch(key, classes[path])
        elif (own.__module__, own.__qualname__) in OVER_CHANNELS:
            left += 1
    report += f"\n{left} norms over channels (RMS_norm, PixelNorm) are left as they are" * (left > 0)
    logging.info("normfuse: %s", report)
    return clone, report


def convert_model(model: Any) -> tuple[Any, str]:
    """A MODEL of ComfyUI whose network is converted when it is loaded, and the report."""
    return _patched(model, "diffusion_model")


def convert_vae(vae: Any) -> tuple[Any, str]:
    """A VAE of ComfyUI, likewise."""
    converted = copy.copy(vae)
    converted.patcher, text = _patched(vae.patcher, "")
    return converted, text
