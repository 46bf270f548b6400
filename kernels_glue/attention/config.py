"""The settings of the node, checked and in one spelling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import KitchenSolError

NODE = "Sol Attention Patch"

# The first option of each is the default; new ones go to the end.
PROVIDER_OPTIONS = ("auto", "kitchen", "nvlabs", "triton", "reference", "builtin")
DENSE_OPTIONS = ("fa", "sage_attn", "kitchen_int8", "current")
CURVE_OPTIONS = ("constant", "linear", "cosine", "step")
THRESH_OPTIONS = ("diag", "exact")
KV_SPLITS_OPTIONS = ("auto", "1", "2", "4")
SINKS_OPTIONS = ("auto", "off", "keys", "keys_and_queries")

CHOICES: Mapping[str, tuple[str, ...]] = {
    "provider": PROVIDER_OPTIONS,
    "dense_backend": DENSE_OPTIONS,
    "curve": CURVE_OPTIONS,
    "thresh_type": THRESH_OPTIONS,
    "kv_splits": KV_SPLITS_OPTIONS,
    "sinks": SINKS_OPTIONS,
}

# Other names under which people know an option, as they write them in API JSON.
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "provider": {
        "comfy_kitchen": "kitchen",
        "built_in": "builtin",
        "sol_attn": "nvlabs",
        "nvidia": "nvlabs",
        "sana": "nvlabs",
        "ref": "reference",
    },
    "dense_backend": {
        "sage": "sage_attn",
        "sageattn": "sage_attn",
        "sageattention": "sage_attn",
        "sage_attention": "sage_attn",
        "sage2": "sage_attn",
        "sageattn2": "sage_attn",
        "sageattention2": "sage_attn",
        "flash": "fa",
        "flash_attn": "fa",
        "flash_attention": "fa",
        "flashattention": "fa",
        **{
            f"{name}{n}": "fa"
            for name in ("fa", "flash_attn_", "flash_attn", "flashattention")
            for n in (2, 3, 4)
        },
        "int8": "kitchen_int8",
        "int8_attention": "kitchen_int8",
    },
}

# (lowest, highest) value of each number.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "tau": (-100.0, 100.0),
    "tau_end": (-100.0, 100.0),
    "dense_percent": (0.0, 1.0),
    "dense_steps": (-1, 10_000),
    "sink_start": (0, 2**31 - 1),
    "sink_tokens": (0, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "token_aug": (0, 256),
    "steps": (1, 1_000),
}
TOKEN_AUG_STEP = 64


@dataclass(frozen=True)
class SolConfig:
    """Settings of one Sol Attention Patch.

    Attributes:
        provider: the Sol kernel, or `auto`.
        dense_backend: what computes everything that is not sparse.
        tau: threshold of the first sparse step, in standard deviations.
        thresh_type: how the standard deviation is computed, `diag` or `exact`.
        kv_splits: parts of the keys that are computed side by side.
        sinks: what is exact about the text rows.
        curve: how tau goes from `tau` to `tau_end` over the sparse steps.
        dense_percent: the part of the noise schedule that is dense, as core's percents count it.
        dense_steps: number of dense steps of the sampler instead; -1 goes by percent.
        dense_layers: layers that are always dense, as text.
        sink_start, sink_tokens: a range of rows by hand; 0 tokens goes by the model's layout.
        min_tokens: shortest sequence that is sparse; 0 goes by provider.
        token_aug: single keys routed besides blocks.
        strict: an unexpected dense call is an error.
        profile: measure the time of the calls.
        steps: number of steps that the schedule is drawn for; nothing else depends on it.
    """

    provider: str = "auto"
    dense_backend: str = "fa"
    tau: float = 1.0
    curve: str = "constant"
    tau_end: float = 1.0
    thresh_type: str = "diag"
    kv_splits: str = "auto"
    dense_percent: float = 0.2
    dense_steps: int = -1
    dense_layers: str = "0"
    sinks: str = "auto"
    sink_start: int = 0
    sink_tokens: int = 0
    min_tokens: int = 0
    token_aug: int = 0
    strict: bool = False
    profile: bool = False
    steps: int = 20

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> SolConfig:
        """Reads the node's inputs.

        Raises:
            KitchenSolError: a value is not one of the choices or out of bounds; it names the input.
        """
        values = {field.name: inputs[field.name] for field in fields(cls) if field.name in inputs}
        for name in CHOICES.keys() & values.keys():
            values[name] = choice(name, values[name])
        for name in BOUNDS.keys() & values.keys():
            values[name] = _number(name, values[name])
        if values.get("token_aug", 0) % TOKEN_AUG_STEP:
            raise KitchenSolError(
                NODE,
                f"token_aug is {values['token_aug']}, which is not a multiple of {TOKEN_AUG_STEP}.",
                "Use 0, 64, 128, 192 or 256.",
            )
        return cls(**values)


def choice(name: str, value: Any) -> str:
    """The option that a value means, whatever its case, with `-`, `_` and blanks alike.

    Raises:
        KitchenSolError: it means none of them; the message lists the choices.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    spelled = "_".join(str(value).strip().lower().replace("-", "_").split())
    meant = _ALIASES.get(name, {}).get(spelled, spelled)
    if meant not in CHOICES[name]:
        raise KitchenSolError(NODE, f"{name} is {value!r}.", f"Use one of: {_listed(CHOICES[name])}.")
    return meant


def _number(name: str, value: Any) -> float | int:
    low, high = BOUNDS[name]
    whole = isinstance(getattr(SolConfig, name), int)
    try:
        number = float(value)
        fits = math.isfinite(number) and low <= number <= high and (not whole or number == int(number))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        kind = "whole number" if whole else "number"
        raise KitchenSolError(NODE, f"{name} is {value!r}.", f"Use a {kind} from {low} to {high}.")
    return int(number) if whole else number + 0.0  # no -0.0


def _listed(options: Iterable[str]) -> str:
    return ", ".join(options)
