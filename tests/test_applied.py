"""The pack's nodes can be taken off a model and put on again: each way gives the bits that belong to it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import builders, inprocess
from comfyui.builders import TinyModel
from int8_node import LORA_A, LORA_B, difference, quantize
from offload_node import budget_for, offload
from sol_node import OVERRIDE, patch, sdpa, with_override

pytestmark = pytest.mark.usefixtures("inference")

MakeTiny = Callable[..., TinyModel]
Change = Callable[[Any], Any]

applied = inprocess.pack_module("kernels_glue.applied")
settings = inprocess.pack_module("kernels_glue.compare.settings")

SOL = {"tau": 0.7, "dense_steps": 1, "dense_layers": "", "min_tokens": 1}
LATENT = {"wan": {"width": 128, "height": 128, "length": 5}, "h3": {}, "flux": {"width": 128, "height": 128}}
EFFECT = 1e-3  # relative L2; that of INT8 is some 1e-2


class Chain:
    """The nodes on a tiny model, as functions from model to model; `held` keeps what a graph would keep."""

    def __init__(self, comfy: ModuleType, model: TinyModel, folder: Path):
        self.comfy, self.model = comfy, model
        self.held: list[Any] = []
        self.files = {}
        for name, layers in (("a", LORA_A), ("b", LORA_B)):
            self.files[name] = folder / f"{name}.safetensors"
            builders.write_lora(self.files[name], model, layers[model.family], seed=ord(name))
        self.steps: dict[str, Change] = {
            "int8": lambda m: quantize(comfy, m, ignored_layers="re:1")[0],
            "bake": lambda m: quantize(comfy, m, lora="bake")[0],
            "sol": lambda m: patch(comfy, m, **SOL)[0],
            "offload": lambda m: offload(m, vram_budget_gb=budget_for(m, 1))[0],
            "a": lambda m: comfy.apply_lora(m, self.files["a"], 0.6),
            "b": lambda m: comfy.apply_lora(m, self.files["b"], 0.8),
        }

    def build(self, *steps: str) -> Any:
        patcher = self.comfy.load_unet(self.model.path)
        for step in steps:
            self.held.append(patcher)
            patcher = self.steps[step](patcher)
        return patcher

    def sample(self, patcher: Any, **options: Any) -> torch.Tensor:
        return self.comfy.sample(patcher, self.model, **LATENT[self.model.family], **options)


@pytest.fixture
def chain(comfy: ModuleType, tiny: MakeTiny, tmp_path: Path) -> Callable[[str], Chain]:
    return lambda family: Chain(comfy, tiny(family), tmp_path)


def check(chain: Chain, *steps: str) -> Any:
    """Taking off and putting on again, against models that were built by the nodes alone."""
    patcher = chain.build(*steps)
    plain = chain.build(*(step for step in steps if step in ("a", "b")))
    expected, bits = chain.sample(plain), chain.sample(patcher)
    bare = settings.without_our_patches(patcher)
    assert_nothing_of_ours(bare)
    assert torch.equal(chain.sample(bare), expected)
    again = settings.apply_settings(bare, applied.settings_of(patcher))
    assert torch.equal(chain.sample(again), bits)
    assert torch.equal(chain.sample(patcher), bits)
    assert torch.equal(chain.sample(bare), expected)
    return patcher


def assert_nothing_of_ours(bare: Any) -> None:
    """Neither on a patcher nor on a clone of it, as another node makes it."""
    for patcher in (bare, bare.clone()):
        assert applied.settings_of(patcher) == applied.Settings() and not patcher.attachments
        keys = [
            key for kind in (patcher.callbacks, patcher.wrappers) for found in kind.values() for key in found
        ]
        assert not [key for key in keys if str(key).startswith("kitchen_")]
        assert not [base for base in type(patcher).__mro__ if "kernels_glue" in base.__module__]
        assert OVERRIDE not in patcher.model_options["transformer_options"]


ORDERS = list(itertools.permutations(("int8", "sol", "offload")))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_any_order_with_lora_between(chain: Callable[[str], Chain], order: tuple[str, str, str]) -> None:
    one, two, three = order
    patcher = check(chain("wan"), "a", one, "b", two, three)
    found = applied.settings_of(patcher)
    assert found.int8.ignored_layers == "re:1" and found.sol.tau == 0.7
    assert found.offload.vram_budget_gb > 0 and found.int8_before == ()


@pytest.mark.core
@pytest.mark.parametrize("family", ["h3", "flux"])
@pytest.mark.parametrize("steps", [("a", "int8", "sol", "b"), ("sol", "bake")])
def test_other_families(chain: Callable[[str], Chain], family: str, steps: tuple[str, ...]) -> None:
    check(chain(family), *steps)


@pytest.mark.core
@pytest.mark.parametrize("steps", [("a", "bake", "b"), ("a", "offload", "bake", "a"), ("a", "b", "bake")])
def test_baked_lora_comes_back(chain: Callable[[str], Chain], steps: tuple[str, ...]) -> None:
    """A baked LoRA is in no list of the quantized model."""
    check(chain("wan"), *steps)


def test_each_node_has_an_effect(chain: Callable[[str], Chain]) -> None:
    """The equalities above would hold for nodes that do nothing."""
    one = chain("wan")
    plain = one.sample(one.build())
    assert not torch.equal(one.sample(one.build("sol")), plain)
    for step in ("int8", "bake", "a", "b"):
        assert difference(one.sample(one.build(step)), plain) > EFFECT, step


@pytest.mark.core
def test_what_others_did_stays(comfy: ModuleType, chain: Callable[[str], Chain]) -> None:
    from comfy_extras.nodes_model_advanced import ModelComputeDtype, ModelSamplingSD3

    one = chain("wan")
    source = with_override(one.build(), sdpa)
    [source] = comfy.run_node(ModelComputeDtype, model=source, dtype="bf16")
    patched = one.steps["sol"](one.steps["int8"](source))
    wrapped: list[str] = []

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped.append("ran")
        return executor(*args, **kwargs)

    [patched] = comfy.run_node(ModelSamplingSD3, model=patched, shift=3.0)
    patched.add_wrapper("apply_model", wrapper)
    bare = settings.without_our_patches(patched)
    assert bare.model_options["transformer_options"][OVERRIDE] is sdpa
    assert bare.get_model_object("manual_cast_dtype") is torch.bfloat16 and bare.force_cast_weights
    [expected] = comfy.run_node(ModelSamplingSD3, model=source, shift=3.0)
    wanted = one.sample(expected)
    assert torch.equal(one.sample(bare), wanted)
    assert len(wrapped) == 3
    assert type(bare) is type(source) and not bare.attachments


@pytest.mark.core
def test_it_is_on_clones_and_the_later_node_counts(chain: Callable[[str], Chain], comfy: ModuleType) -> None:
    one = chain("wan")
    first = one.build("sol")
    second = patch(comfy, first, tau=1.5, min_tokens=1)[0]
    for patcher, tau in ((first, 0.7), (second, 1.5), (second.clone().clone(), 1.5)):
        assert applied.settings_of(patcher).sol.tau == tau
    assert applied.settings_of(one.build()) == applied.Settings()


def test_int8_twice(chain: Callable[[str], Chain], comfy: ModuleType) -> None:
    """The second quantizes what the first left."""
    one = chain("wan")
    first = one.build("int8")
    second = quantize(comfy, first)[0]
    found = applied.settings_of(second)
    assert found.int8.ignored_layers == "" and [c.ignored_layers for c in found.int8_before] == ["re:1"]
    bare = settings.without_our_patches(second)
    assert torch.equal(one.sample(bare), one.sample(one.build()))
    assert torch.equal(one.sample(settings.apply_settings(bare, found)), one.sample(second))


@pytest.mark.core
def test_a_source_that_is_gone(chain: Callable[[str], Chain]) -> None:
    one = chain("wan")
    quantized = one.build("int8")
    one.held.clear()
    gc.collect()
    way = r"Connect the very output that goes into .*LoRA included.*'reference'"
    with pytest.raises(ValueError, match=rf"no longer in memory.*{way}"):
        settings.without_our_patches(quantized)


@pytest.mark.core
def test_one_that_the_source_was_made_from_will_do(chain: Callable[[str], Chain]) -> None:
    one = chain("wan")
    quantized = one.build("a", "sol", "int8")
    expected = one.sample(one.build("a"))
    del one.held[1:]  # the loader's output stays
    gc.collect()
    assert torch.equal(one.sample(settings.without_our_patches(quantized)), expected)
    baked = one.build("a", "bake")
    del one.held[1:]
    gc.collect()
    with pytest.raises(ValueError, match="no longer in memory"):  # the LoRA is nowhere else
        settings.without_our_patches(baked)


@pytest.mark.core
def test_a_patch_that_holds_layers_of_the_quantized_model(chain: Callable[[str], Chain]) -> None:
    one = chain("wan")
    quantized = one.build("int8")
    block = quantized.model.diffusion_model.blocks[0]
    quantized.add_object_patch("diffusion_model.blocks.0", block)
    with pytest.raises(ValueError, match=r"Kitchen Compare Models: the input model carries a replaced part"):
        settings.without_our_patches(quantized)


def test_a_trial_is_not_kept(chain: Callable[[str], Chain]) -> None:
    import weakref

    one = chain("wan")
    source = one.build()
    config = inprocess.pack_module("kernels_glue.quantization.config").QuantizeConfig()
    trial = settings.apply_settings(source, applied.Settings(int8=config))
    model = weakref.ref(trial.model)
    del trial
    gc.collect()
    assert model() is None
