"""Sequences and heads that do not fit a kernel's blocks, on real models."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from int8_node import difference
from sol_node import patch, require_cpu, spy_on, tally_of, with_override

pytestmark = pytest.mark.core

providers = inprocess.pack_module("kernels_glue.attention.providers")
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError


def core() -> Callable[..., torch.Tensor]:
    from comfy.ldm.modules.attention import attention_pytorch

    return attention_pytorch


# --- odd grids -----------------------------------------------------------------------------------

ODD = {
    # 3 frames of 17 x 25 latent pixels in patches of 2: 9 x 13.
    "wan": ({"width": 200, "height": 136, "length": 9}, 3 * 9 * 13, 0),
    "flux": ({"width": 200, "height": 136}, 9 * 13 + 16, 16),
    "h3": ({"width": 240, "height": 208, "length": 22}, None, None),
}


@pytest.mark.parametrize("family", ODD)
def test_grids_that_no_block_divides(
    comfy: ModuleType, tiny: Callable[..., TinyModel], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    latent, tokens, text = ODD[family]
    model = tiny(family)
    source = comfy.load_unet(model.path)
    plain = comfy.sample(source, model, steps=1, **latent)
    spy = spy_on(monkeypatch)
    settings = {"dense_percent": 0, "dense_layers": ""}
    everything, _ = patch(comfy, source, tau=-100, **settings)
    assert difference(comfy.sample(everything, model, steps=1, **latent), plain) < 1e-3
    layers_of_model = 4 if family == "flux" else 2
    assert spy.count == layers_of_model
    some, _ = patch(comfy, source, tau=1, **settings)
    assert 1e-4 < difference(comfy.sample(some, model, steps=1, **latent), plain) < 1
    for shape, options in spy.calls:
        assert shape[1] % 64 and tokens in (None, shape[1])
        assert text is None or options.sink_keys == ((0, text) if text else (0, 0))
    assert tally_of(some).sparse.total() == layers_of_model


# --- head_dim 64 ---------------------------------------------------------------------------------


def test_head_dim_64_is_dense_with_its_reason(
    comfy: ModuleType, tiny: Callable[..., TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LTX, and a kernel that is made to say that it runs on this device."""
    require_cpu("fa is core's own attention there, bit for bit")
    kernel = providers.PROVIDERS["kitchen"]
    monkeypatch.setattr(kernel, "missing", lambda device: "")
    monkeypatch.setattr(kernel, "unsupported", lambda options: "")
    model = tiny("ltx")
    source = comfy.load_unet(model.path)

    def dense(function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return core()(*args, **kwargs)

    expected = comfy.sample(with_override(source, dense), model, steps=2)
    settings = {"provider": "kitchen", "min_tokens": 1, "dense_steps": 1}
    patched, _ = patch(comfy, source, **settings)
    assert torch.equal(comfy.sample(patched, model, steps=2), expected)
    reasons = tally_of(patched).reasons
    assert reasons["kitchen: head_dim 64, not 128"] == 1  # layer 1 of step 1
    assert reasons["cross-attention"] == 4 and reasons["dense step"] == 2 and reasons["dense layer"] == 1
    strict, _ = patch(comfy, source, strict=True, **settings)
    with pytest.raises(KitchenSolError, match=r"strict is on .* because of: kitchen: head_dim 64, not 128"):
        comfy.sample(strict, model, steps=2)


def test_head_dim_64_goes_sparse_where_a_kernel_takes_it(
    comfy: ModuleType, tiny: Callable[..., TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LTX by the reference: everything exact is the unpatched model, the usual threshold is not."""
    model = tiny("ltx")
    source = comfy.load_unet(model.path)
    latent = {"width": 512, "height": 512, "length": 17}  # 3 x 16 x 16 tokens, 12 blocks
    plain = comfy.sample(source, model, steps=1, **latent)
    spy = spy_on(monkeypatch)
    settings = {"dense_percent": 0, "dense_layers": "", "strict": True}
    everything, _ = patch(comfy, source, tau=-100, **settings)
    assert difference(comfy.sample(everything, model, steps=1, **latent), plain) < 1e-3
    assert {shape[1:] for shape, _ in spy.calls} == {(768, model.config["num_attention_heads"], 64)}
    sparse, _ = patch(comfy, source, tau=1, **settings)
    assert difference(comfy.sample(sparse, model, steps=1, **latent), plain) > 1e-4
    assert tally_of(sparse).sparse.total() == model.config["num_layers"]
