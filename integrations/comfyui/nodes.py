# SPDX-License-Identifier: MIT
"""The nodes by the older interface."""
from .conversion import convert_model, convert_vae

CATEGORY = "normfuse"
DESCRIPTIONS = {
    "vae": "Group norms and the activations after them become fused calls, in decoding and encoding. "
           "Prints what was done.",
    "model": "Norms and the activations after them become fused calls: for UNets. Prints what was done.",
}


class ConvertVAE:
    CATEGORY, DESCRIPTION, FUNCTION = CATEGORY, DESCRIPTIONS["vae"], "execute"
    RETURN_TYPES, RETURN_NAMES = ("VAE", "STRING"), ("vae", "report")

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"vae": ("VAE",)}}

    def execute(self, vae):
        return convert_vae(vae)


class ConvertModel:
    CATEGORY, DESCRIPTION, FUNCTION = CATEGORY, DESCRIPTIONS["model"], "execute"
    RETURN_TYPES, RETURN_NAMES = ("MODEL", "STRING"), ("model", "report")

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def execute(self, model):
        return convert_model(model)


NODE_CLASS_MAPPINGS = {"NormfuseConvertVAE": ConvertVAE, "NormfuseConvertModel": ConvertModel}
NODE_DISPLAY_NAME_MAPPINGS = {"NormfuseConvertVAE": "Convert VAE (normfuse)",
                              "NormfuseConvertModel": "Convert model (normfuse)"}
