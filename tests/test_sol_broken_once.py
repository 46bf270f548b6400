"""Small cases of kinds that once went wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from int8_node import difference
from sol_node import OVERRIDE, patch, shown, spy_on, tally_of

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("inference")]

routing = inprocess.pack_module("kernels_glue.attention.routing")
PROVIDERS = inprocess.pack_module("kernels_glue.attention.providers").PROVIDERS
MakeTiny = Callable[..., TinyModel]
# Every step sparse, no layer dense.
ALL = {"dense_percent": 0, "dense_layers": ""}
STEPS = 2


@pytest.fixture
def wan(comfy: ModuleType, tiny: MakeTiny) -> tuple[Any, TinyModel]:
    model = tiny("wan")
    return comfy.load_unet(model.path), model


# --- layers of a model that gives no index --------------------------------------------------------


def replaced_block(model: Any, index: int, replacement: Callable[..., Any]) -> Any:
    clone = model.clone()
    clone.set_model_patch_replace(replacement, "dit", "double_block", index)
    return clone


@pytest.mark.parametrize(
    ("replacement", "sparse"),
    [
        (lambda args, extra: {"img": args["img"]}, 0),
        (lambda args, extra: extra["original_block"](args), 1),
        (lambda args, extra: extra["original_block"](extra["original_block"](args) | args), 2),
    ],
    ids=["skipped", "run", "run twice"],
)
@pytest.mark.parametrize("family", ["h3", "wan"])
def test_a_replaced_block_keeps_its_layer(
    comfy: ModuleType,
    tiny: MakeTiny,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    replacement: Callable[..., Any],
    sparse: int,
) -> None:
    """Layer 1 is dense, so only what block 0 does is sparse."""
    model = tiny(family)
    patched, _ = patch(comfy, comfy.load_unet(model.path), dense_percent=0, dense_layers="1")
    spy = spy_on(monkeypatch)
    comfy.sample(replaced_block(patched, 0, replacement), model, steps=STEPS)
    assert spy.count == STEPS * sparse
    assert tally_of(patched).reasons["dense layer"] == STEPS


def test_core_skipping_a_layer_of_h3_keeps_the_others(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skip layer guidance evaluates a third time without block 0, whose layer is the sparse one."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    model = tiny("h3")
    patched, _ = patch(comfy, comfy.load_unet(model.path), dense_percent=0, dense_layers="1")
    skipping = comfy.run_node(
        SkipLayerGuidanceDiT,
        model=patched,
        double_layers="0",
        single_layers="",
        scale=3.0,
        start_percent=0.0,
        end_percent=1.0,
        rescaling_scale=0.0,
    )[0]
    spy = spy_on(monkeypatch)
    comfy.sample(skipping, model, steps=STEPS, cfg=2.0, negative=True)
    assert spy.count == STEPS * 2
    assert tally_of(patched).reasons["dense layer"] == STEPS * 3


def test_a_block_patch_with_options_of_its_own_is_still_in_the_model(
    comfy: ModuleType, wan: tuple[Any, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model = wan
    patched, _ = patch(comfy, source, strict=True, **ALL)
    kept = ("block_index", "block_type", OVERRIDE)

    def own_options(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        options = {name: args["transformer_options"][name] for name in kept}
        return extra["original_block"]({**args, "transformer_options": options})

    spy = spy_on(monkeypatch)
    comfy.sample(replaced_block(patched, 0, own_options), model, steps=STEPS)
    assert spy.count == STEPS * 2


# --- what is no self-attention, and what no kernel takes ------------------------------------------


def test_cross_attention_of_equal_lengths_is_dense(
    comfy: ModuleType, wan: tuple[Any, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 rows of text and 32 tokens: shapes cannot tell the two apart, so both are dense."""
    source, model = wan
    patched, _ = patch(comfy, source, **ALL)
    positive = comfy.conditioning(model)
    positive[0][0] = positive[0][0].repeat(1, 2, 1)
    assert positive[0][0].shape[1] == 32
    spy = spy_on(monkeypatch)
    comfy.sample(patched, model, steps=STEPS, positive=positive)
    assert spy.count == 0


def test_the_reference_keeps_to_the_head_dims_of_the_kernels(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("lumina2")
    patched, _ = patch(comfy, comfy.load_unet(model.path), **ALL)
    comfy.sample(patched, model, steps=STEPS)
    assert not tally_of(patched).sparse
    assert tally_of(patched).reasons["reference: head_dim 96, not 64 or 128"]


# --- what is said -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"min_tokens": 10_000}, "fewer than 10000 tokens"),
        ({"dense_layers": "0,1"}, "dense layer"),
        ({"provider": "auto"}, "no Sol kernel for"),
    ],
)
def test_nothing_sparse_is_a_warning_with_its_reason(
    comfy: ModuleType, wan: tuple[Any, TinyModel], settings: dict[str, Any], why: str
) -> None:
    source, model = wan
    if settings.get("provider") and torch.cuda.is_available():
        pytest.skip("describes what a CPU lacks")
    patched, texts = shown(source, **{**ALL, **settings})
    comfy.sample(patched, model, steps=STEPS)
    assert texts[-1].startswith(f"WARNING: nothing was sparse, because of: {why}")


def test_copied_options_are_no_other_pack(
    comfy: ModuleType, wan: tuple[Any, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model = wan
    patched, texts = shown(source, strict=True, **ALL)
    copied = patched.clone()
    copied.model_options = copy.deepcopy(patched.model_options)
    spy = spy_on(monkeypatch)
    comfy.sample(copied, model, steps=STEPS)
    assert spy.count == STEPS * 2
    assert texts[-1].startswith(f"sparse {STEPS * 2} calls")


def test_a_call_behind_an_evaluation_is_outside_of_it(
    comfy: ModuleType, wan: tuple[Any, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a ControlNet's, which gets the same options."""
    from comfy.ldm.modules.attention import attention_pytorch

    source, model = wan
    patched, _ = patch(comfy, source, **ALL)
    comfy.sample(patched, model, steps=STEPS)
    spy = spy_on(monkeypatch)
    q = torch.randn(1, 2, 300, 128)
    options = {**patched.model_options["transformer_options"], "block_index": 0}
    attention_pytorch(q, q, q, 2, skip_reshape=True, transformer_options=options)
    assert spy.count == 0
    assert tally_of(patched).reasons[routing.OUTSIDE.text] == 1


def test_a_sampling_that_never_began_leaves_the_text_alone(
    comfy: ModuleType, wan: tuple[Any, TinyModel]
) -> None:
    source, model = wan
    patched, texts = shown(source, **ALL)
    comfy.sample(patched, model, steps=STEPS)
    assert len(texts) == 1
    patched.cleanup()  # what core does after running out of memory before ON_PRE_RUN
    patched.pre_run()  # what is left of it where the next thing fails
    patched.cleanup()
    assert len(texts) == 1
    patched.pre_run()  # without an end
    for _ in range(2):
        comfy.sample(patched.clone(), model, steps=STEPS)
    assert [text.splitlines()[0] for text in texts] == ["sparse 4 calls: reference 4"] * 3


def test_what_settings_keep_dense_is_no_error_under_strict(comfy: ModuleType, tiny: MakeTiny) -> None:
    """A masked text in a dense step: it would be dense without the mask."""
    model = tiny("qwen_image")
    source = comfy.load_unet(model.path)
    positive = comfy.conditioning(model)
    tokens = positive[0][0].shape[1]
    positive[0][1]["attention_mask"] = (torch.arange(tokens) < tokens - 3).long().unsqueeze(0)
    dense, _ = patch(comfy, source, strict=True, dense_percent=1)
    out = comfy.sample(dense, model, steps=STEPS, positive=positive)
    assert set(tally_of(dense).reasons) == {"dense step"}
    assert difference(out, comfy.sample(source, model, steps=STEPS, positive=positive)) < 1e-5
    sparse, _ = patch(comfy, source, strict=True, **ALL)
    with pytest.raises(ValueError, match="because of: mask"):
        comfy.sample(sparse, model, steps=STEPS, positive=positive)


@pytest.mark.parametrize("order", [("nvlabs", "kitchen"), ("kitchen", "nvlabs")])
def test_too_short_for_one_kernel_is_the_reason_in_any_order(
    monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    """fp16, which one kernel does not take at all and the other would at more tokens."""
    for name in order:
        monkeypatch.setattr(type(PROVIDERS[name]), "missing", lambda self, device: "")
    tokens = 10_000
    assert PROVIDERS["nvlabs"].min_tokens < tokens < PROVIDERS["kitchen"].min_tokens
    q = torch.empty(1, 1, tokens, 128, dtype=torch.float16, device="meta")
    call = inprocess.pack_module("kernels_glue.attention.call").read_call(q, q, q, 1, skip_reshape=True)
    router = routing.Router([PROVIDERS[name] for name in order], 0)
    reason = router.choose(call, lambda provider: pytest.fail("asked for options"))
    assert reason == routing.too_short(PROVIDERS["kitchen"].min_tokens)


@pytest.mark.parametrize("error", [TypeError("takes 0 arguments"), RuntimeError("no driver")])
def test_a_kitchen_that_cannot_say_whether_it_can_is_missing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: Any) -> bool:
        raise error

    kitchen = ModuleType("comfy_kitchen")
    kitchen.sol_attn = lambda q, k, v: q
    kitchen.sol_attn_is_available = broken
    module = inprocess.pack_module("kernels_glue.attention.providers.kitchen")
    monkeypatch.setattr(module, "load", lambda name: (kitchen, ""))
    assert str(error) in PROVIDERS["kitchen"].missing(torch.device("cuda"))
    kitchen.sol_attn = None
    assert "has no sol_attn" in PROVIDERS["kitchen"].missing(torch.device("cuda"))


def test_a_broken_matplotlib_costs_the_picture_only(
    comfy: ModuleType, wan: tuple[Any, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    def broken(self: Any) -> None:
        raise ValueError("no font")

    monkeypatch.setattr(FigureCanvasAgg, "draw", broken)
    _, report = patch(comfy, wan[0])
    assert "note: the schedule was not drawn" in report and "no font" in report
