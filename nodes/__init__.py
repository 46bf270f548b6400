"""The nodes of the pack, one file each: schema, tooltips and validation, no tensor work."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .compare_models import KitchenCompareModels
from .copies import warn_of_other_copies
from .kitchen_int8 import KitchenInt8QuantizeModel
from .layerwise_offload import KitchenLayerwiseOffload
from .sol_attention import KitchenSolAttentionPatch


class KitchenSolExtension(ComfyExtension):
    """What ComfyUI asks for the pack's nodes."""

    async def on_load(self) -> None:
        warn_of_other_copies()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            KitchenInt8QuantizeModel,
            KitchenSolAttentionPatch,
            KitchenLayerwiseOffload,
            KitchenCompareModels,
        ]
