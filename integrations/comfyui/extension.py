# SPDX-License-Identifier: MIT
"""The nodes by the newer interface, with the names that the older one has."""
from comfy_api.latest import ComfyExtension, io

from .conversion import convert_model, convert_vae
from .nodes import CATEGORY, DESCRIPTIONS, NODE_DISPLAY_NAME_MAPPINGS


def _schema(name, kind, word):
    return io.Schema(node_id=name, display_name=NODE_DISPLAY_NAME_MAPPINGS[name], category=CATEGORY,
                     description=DESCRIPTIONS[word], inputs=[kind.Input(word)],
                     outputs=[kind.Output(display_name=word), io.String.Output(display_name="report")])


class ConvertVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return _schema("NormfuseConvertVAE", io.Vae, "vae")

    @classmethod
    def execute(cls, vae):
        return io.NodeOutput(*convert_vae(vae))


class ConvertModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return _schema("NormfuseConvertModel", io.Model, "model")

    @classmethod
    def execute(cls, model):
        return io.NodeOutput(*convert_model(model))


class Extension(ComfyExtension):
    async def get_node_list(self):
        return [ConvertVAE, ConvertModel]


async def comfy_entrypoint():
    return Extension()
