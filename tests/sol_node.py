"""What several test files need to run Sol Attention Patch on real ComfyUI objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess

NODE_ID = "KitchenSolAttentionPatch"
OVERRIDE = "optimized_attention_override"
FAMILIES = ("wan", "h3", "flux")

# Latents with some 500 tokens, enough blocks to leave some out, and with 1,000 and more.
SHORT = {
    "wan": {"width": 256, "height": 256, "length": 5},  # 2 x 16 x 16 tokens
    "h3": {"width": 256, "height": 256, "length": 22},
    "flux": {"width": 352, "height": 352},  # 22 x 22 and the text
}
LONG = {
    "wan": {"width": 256, "height": 256, "length": 17},
    "h3": {"width": 384, "height": 384, "length": 22},
    "flux": {"width": 512, "height": 512},
}


def patch(comfy: ModuleType, model: Any, *, unique_id: str = "1", **settings: Any) -> tuple[Any, str]:
    """Run the node with `provider` reference, its other defaults, and `settings`; (model, report)."""
    result = comfy.run_node(
        comfy.pack_nodes()[NODE_ID],
        unique_id=unique_id,
        model=model,
        **{"provider": "reference", **settings},
    )
    return result[0], result[1]


def shown(source: Any, **settings: Any) -> tuple[Any, list[str]]:
    """The patched model, as `patch` makes it, and a list that its texts after sampling come to."""
    apply = inprocess.pack_module("kernels_glue.attention.apply")
    config = inprocess.pack_module("kernels_glue.attention.config").SolConfig
    texts: list[str] = []
    patched, *_ = apply.patch_attention(
        source,
        config.of({"provider": "reference", **settings}),
        lambda report: texts.append(report.text),
    )
    return patched, texts


@dataclass
class Spy:
    """The calls that a provider really got, in order."""

    calls: list[tuple[tuple[int, ...], Any]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.calls)


def spy_on(monkeypatch: pytest.MonkeyPatch, provider: str = "reference") -> Spy:
    """Records the shape [B, T, H, D] and the options of each call of a provider, which goes on working."""
    spy = Spy()
    real = inprocess.pack_module("kernels_glue.attention.providers").PROVIDERS[provider]
    run = real.run

    def recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Any) -> Any:
        spy.calls.append((tuple(q.shape), options))
        return run(q, k, v, options)

    monkeypatch.setattr(real, "run", recorded)
    return spy


def with_override(model: Any, override: Callable[..., torch.Tensor]) -> Any:
    """A clone of `model` with an attention override of the test's own."""
    clone = model.clone()
    clone.model_options["transformer_options"][OVERRIDE] = override
    return clone


def tally_of(patched: Any) -> Any:
    """What the node counted in the last sampling of a patched model."""
    return patched.model_options["transformer_options"][OVERRIDE]._tally()


def sdpa(func: Any, q: Any, k: Any, v: Any, heads: int, mask: Any = None, **options: Any) -> torch.Tensor:
    """PyTorch's attention as an override: the dense result by other means than the pack's."""
    if not options.get("skip_reshape"):
        q, k, v = (t.view(t.shape[0], t.shape[1], heads, -1).transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if options.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)


def require_cpu(why: str = "is about what a CPU lacks") -> None:
    """Skips the test where ComfyUI runs on another device."""
    import comfy.model_management as management

    if management.get_torch_device().type != "cpu":
        pytest.skip(f"needs ComfyUI on a CPU: {why}")
