# SPDX-License-Identifier: MIT
"""ComfyUI nodes of normfuse: "Convert VAE" and "Convert model". ComfyUI reads the mappings, or comfy_entrypoint where
it has the newer interface of nodes."""
from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]

try:
    import comfy_api.latest  # noqa: F401
except ImportError:  # an older ComfyUI
    pass
else:
    from .extension import comfy_entrypoint  # noqa: F401
    __all__.append("comfy_entrypoint")
