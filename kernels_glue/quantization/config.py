"""The settings of one quantization, parsed once and immutable from then on."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import KitchenSolError
from .patterns import Pattern, parse_patterns

NODE = "Kitchen INT8 Quantize Model"

# ConvRot rotates groups of this many inputs by a regular Hadamard matrix, which exists for powers of
# 4; 256 is what comfy_kitchen's fused activation quantizer takes, so it is preferred.
GROUP_SIZES = (256, 64, 16)

AUTO = "auto"
GROUP_SIZE_OPTIONS = (AUTO, *map(str, GROUP_SIZES))
LAYERS_OPTIONS = ("blocks", "blocks+modulation", "all")
LORA_OPTIONS = ("keep", "bake")
DEVICE_OPTIONS = (AUTO, "cpu")


@dataclass(frozen=True)
class QuantizeConfig:
    """What the user asked for.

    Attributes:
        group_size: `auto`, or one ConvRot group size as text.
        layers: which layers are candidates, one of `LAYERS_OPTIONS`.
        ignored_layers: the text that `ignored` was parsed from.
        lora: whether LoRA patches before the node are kept as patches or merged.
        device: where the weights are quantized, one of `DEVICE_OPTIONS`.
        ignored: the parsed patterns of layers to leave alone.
    """

    group_size: str = AUTO
    layers: str = "blocks"
    ignored_layers: str = ""
    lora: str = "keep"
    device: str = AUTO
    ignored: tuple[Pattern, ...] = field(default=(), init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raises KitchenSolError for a value that is no option or a pattern that does not parse."""
        _require("group_size", self.group_size, GROUP_SIZE_OPTIONS)
        _require("layers", self.layers, LAYERS_OPTIONS)
        _require("lora", self.lora, LORA_OPTIONS)
        _require("device", self.device, DEVICE_OPTIONS)
        try:
            patterns = parse_patterns(self.ignored_layers)
        except ValueError as error:
            raise KitchenSolError(
                NODE, f"ignored_layers: {error}.", "Correct that line or remove it."
            ) from error
        object.__setattr__(self, "ignored", patterns)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """The ConvRot group sizes to try for a layer, the preferred one first."""
        return GROUP_SIZES if self.group_size == AUTO else (int(self.group_size),)


def _require(name: str, value: object, options: tuple[str, ...]) -> None:
    if value not in options:
        raise KitchenSolError(NODE, f"{name} is {value!r}.", f"Choose one of: {', '.join(options)}.")
