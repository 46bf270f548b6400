"""LoRA on streamed models: the bits of core's own resident load, and nothing stays in the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui.builders import TinyModel
from comfyui.lora import write_lora
from int8_node import DITS, LORA_A, LORA_B, quantize, static
from offload_node import bits, in_host_memory, offload, placed, same, unload
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("inference")

MakeTiny = Callable[..., TinyModel]
# Four main blocks, of which one is resident and three rotate through two slabs: each is copied at each step.
SMALL: dict[str, dict[str, int]] = {
    "wan": {"dim": 128, "ffn_dim": 128, "num_layers": 4},
    "h3": {"num_layers": 4},
    "flux": {},
}
SETTINGS = {"resident_blocks": 1, "vram_budget_gb": 64.0, "strategy": "stream"}


class Bench:
    """One model and its LoRA files, sampled as core does it and streamed."""

    def __init__(self, comfy: ModuleType, model: TinyModel, folder: Path) -> None:
        self.comfy, self.model = comfy, model
        self.paths = {name: folder / f"{name}.safetensors" for name in "ab"}
        # alpha is not the rank, so that a forgotten alpha / rank shows; b also goes outside of the blocks.
        write_lora(self.paths["a"], model, LORA_A[model.family], alpha=8.0)
        write_lora(self.paths["b"], model, (*LORA_B[model.family], *OUTSIDE[model.family]), seed=12)

    def load(self) -> Any:
        return static(self.comfy.load_unet(self.model.path))

    def lora(self, patcher: Any, *loras: tuple[str, float]) -> Any:
        for name, strength in loras:
            patcher = self.comfy.apply_lora(patcher, self.paths[name], strength)
        return patcher

    def sample(self, patcher: Any, **options: Any) -> torch.Tensor:
        return self.comfy.sample(patcher, self.model, **{"steps": 2, **options})


OUTSIDE = {"wan": ("time_embedding.0",), "h3": (), "flux": ("img_in",)}


@pytest.fixture
def bench(comfy: ModuleType, tiny: MakeTiny, tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    yield lambda family="wan": Bench(comfy, tiny(family, **SMALL[family]), tmp_path)
    comfy.unload_all()


def check_streams(patcher: Any, layers: tuple[str, ...] = ()) -> None:
    """All blocks but one stream, and of the layers some are in streamed blocks and some are not."""
    streaming = placed(patcher).streaming
    assert len(streaming.plan.resident) == 1 and len(streaming.plan.streamed) >= 3
    assert streaming.traffic.copies >= 2 * len(streaming.plan.streamed)
    streamed = tuple(f"{streaming.blocks[i].name}." for i in streaming.plan.streamed)
    assert not layers or {f"diffusion_model.{name}".startswith(streamed) for name in layers} == {True, False}


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("int8", [False, True], ids=["float", "INT8"])
@pytest.mark.parametrize("family", DITS)
def test_before_and_after_the_node_changed_and_removed(
    bench: Callable[..., Bench], family: str, int8: bool
) -> None:
    case = bench(family)
    source = quantize(case.comfy, case.load())[0] if int8 else case.load()
    loras = {
        "none": (),
        "one": (("a", 1.0),),
        "weaker": (("a", 0.5),),
        "two": (("a", 1.0), ("b", -0.75)),
    }
    expected = {name: case.sample(case.lora(source, *chosen)) for name, chosen in loras.items()}
    assert all(not torch.equal(expected["none"], expected[name]) for name in ("one", "weaker", "two"))
    assert not torch.equal(expected["one"], expected["weaker"])
    unload()
    before = bits(source)

    streamed, *_ = offload(source, **SETTINGS)
    # From one to the next without unloading, as when a user turns a slider.
    for name in ("one", "weaker", "none", "two", "one"):
        patched = case.lora(streamed, *loras[name])
        assert torch.equal(case.sample(patched), expected[name]), name
        check_streams(patched, LORA_A[family] + LORA_B[family])
        assert set(patched.backup) == set(patched.patches)
    between, *_ = offload(case.lora(source, *loras["two"][:1]), **SETTINGS)
    assert torch.equal(case.sample(case.lora(between, *loras["two"][1:])), expected["two"])
    assert torch.equal(case.sample(streamed), expected["none"])
    assert torch.equal(case.sample(case.lora(streamed, *loras["one"])), expected["one"])
    unload()
    assert same(bits(source), before) and not source.backup
    assert torch.equal(case.sample(source), expected["none"])
    assert torch.equal(case.sample(case.lora(source, *loras["one"])), expected["one"])


@pytest.mark.parametrize("setting", ["keep", "bake"])
def test_before_int8(bench: Callable[..., Bench], setting: str) -> None:
    case = bench("h3")
    source = case.load()
    quantized, _ = quantize(case.comfy, case.lora(source, ("a", 1.0)), lora=setting)
    expected = case.sample(case.lora(quantized, ("b", 1.0)))
    plain = case.sample(source)
    unload()
    streamed = case.lora(offload(quantized, **SETTINGS)[0], ("b", 1.0))
    assert torch.equal(case.sample(streamed), expected)
    check_streams(streamed)
    assert torch.equal(case.sample(source), plain)


# --- what stays behind ----------------------------------------------------------------------------


def shape_changing(patcher: Any, key: str) -> Any:
    """A clone with a patch of core's own kind that makes a weight one row longer."""
    rows, columns = patcher.model_state_dict()[key].shape
    clone = patcher.clone()
    assert clone.add_patches({key: ("diff", (torch.ones(rows + 1, columns), {"pad_weight": True}))}) == [key]
    return clone


@pytest.mark.parametrize("block", [1, 2], ids=["resident", "streamed"])
def test_a_patch_that_changes_a_shape_is_refused_and_leaves_nothing(
    bench: Callable[..., Bench], block: int
) -> None:
    case = bench()
    source = case.load()
    before, expected = bits(source), case.sample(case.lora(source, ("a", 1.0)))
    streamed, *_ = offload(source, **SETTINGS)
    key = f"diffusion_model.blocks.{block}.ffn.2.weight"
    # The LoRA is on the first block too, and written when the other patch is refused.
    bad = shape_changing(case.lora(streamed, ("a", 1.0)), key)
    message = (
        rf"^Layerwise Offload: a patch gives {key} another shape \(\(129, 128\) instead of \(128, 128\)\)"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            case.sample(bad)
        assert placed(bad) is None and bad.loaded_size() == 0 and not bad.backup
        assert same(bits(source), before)
    assert torch.equal(case.sample(case.lora(streamed, ("a", 1.0))), expected)


def saved(comfy: ModuleType, patcher: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that core's ModelSave writes of a patcher."""
    import folder_paths
    from comfy_extras.nodes_model_merging import ModelSave

    earlier = set(folder.glob("saved_*.safetensors"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_paths, "output_directory", str(folder))
        comfy.run_node(ModelSave, model=patcher, filename_prefix="saved")
    [path] = set(folder.glob("saved_*.safetensors")) - earlier
    return load_file(str(path))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


@pytest.mark.core
@pytest.mark.parametrize("int8", [False, True], ids=["float", "INT8"])
def test_save_writes_what_core_writes_for_the_resident_model(
    bench: Callable[..., Bench], tmp_path: Path, int8: bool
) -> None:
    case = bench("h3")
    source = quantize(case.comfy, case.load())[0] if int8 else case.load()
    lora = ("a", 1.0)
    expected = saved(case.comfy, case.lora(source, lora), tmp_path)
    plain = saved(case.comfy, source, tmp_path)
    assert not equal(expected, plain)
    unload()
    streamed, *_ = offload(source, **SETTINGS)
    patched = case.lora(streamed, lora)
    assert equal(saved(case.comfy, patched, tmp_path), expected), "never loaded"
    bits_of_it = case.sample(patched)
    assert equal(saved(case.comfy, patched, tmp_path), expected), "loaded"
    assert torch.equal(case.sample(patched), bits_of_it)
    assert equal(saved(case.comfy, streamed, tmp_path), plain), "the LoRA is taken out again"
    unload()
    assert equal(saved(case.comfy, source, tmp_path), plain)


@pytest.mark.parametrize("int8", [False, True], ids=["float", "INT8"])
def test_the_weights_stay_in_their_slabs(bench: Callable[..., Bench], int8: bool) -> None:
    """Also scales and what a LoRA changes; so a second load moves nothing of the original weights."""
    case = bench("h3")
    source = quantize(case.comfy, case.load())[0] if int8 else case.load()
    patched = case.lora(offload(source, **SETTINGS)[0], ("a", 1.0))
    places = set()
    for _ in range(2):
        case.sample(patched)
        streaming = placed(patched).streaming
        places.add(tuple(block.host.data_ptr() for block in streaming.blocks))
        assert all(in_host_memory(streaming.blocks[i]) for i in streaming.plan.streamed)
        unload()
    assert len(places) == 1


@pytest.mark.core
def test_a_second_run_moves_nothing(bench: Callable[..., Bench]) -> None:
    """As in core, which leaves a loaded model where it is: nothing is uploaded or patched again."""
    case = bench()
    patched = case.lora(offload(case.load(), **SETTINGS)[0], ("a", 1.0))
    expected = case.sample(patched)
    streaming = placed(patched).streaming
    copies = streaming.traffic.copies
    assert torch.equal(case.sample(patched), expected)
    assert placed(patched).streaming is streaming
    assert streaming.traffic.copies == copies + 2 * 3, "two steps, three blocks"


# --- who reads the weights while they are loaded ----------------------------------------------------


def test_key_patches_of_a_loaded_model_are_pristine(bench: Callable[..., Bench]) -> None:
    case = bench()
    source = case.load()
    expected = {key: value[0][0].clone() for key, value in source.get_key_patches("diffusion_model.").items()}
    streamed, *_ = offload(source, **SETTINGS)
    patched = case.lora(streamed, ("a", 1.0), ("b", 1.0))
    case.sample(patched)
    for patcher in (patched, streamed, source):
        found = patcher.get_key_patches("diffusion_model.")
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert torch.equal(value[0][0].cpu(), expected[key]), key


@pytest.mark.parametrize("order", ["merged while loaded", "loaded after the merge"])
def test_merging_sees_pristine_weights(bench: Callable[..., Bench], tiny: MakeTiny, order: str) -> None:
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    case = bench()

    def merged(one: Any, two: Any) -> Any:
        return case.comfy.run_node(ModelMergeSimple, model1=one, model2=two, ratio=0.6)[0]

    source = case.load()
    other = static(case.comfy.load_unet(tiny("wan", **SMALL["wan"], seed=1).path))
    expected = case.sample(merged(other, source))
    assert not torch.equal(expected, case.sample(other))
    streamed, *_ = offload(source, **SETTINGS)
    patched = case.lora(streamed, ("a", 1.0))
    first = case.sample(patched)
    if order == "merged while loaded":
        mix = merged(other, streamed)
    else:
        unload()
        mix = merged(other, streamed)
        assert torch.equal(case.sample(patched), first)
    assert torch.equal(case.sample(mix), expected)
    unload()
    streamed_mix, *_ = offload(mix, **SETTINGS)
    assert torch.equal(case.sample(streamed_mix), expected)
    check_streams(streamed_mix)
    assert torch.equal(case.sample(patched), first)


# --- LoRA hooks -------------------------------------------------------------------------------------


@pytest.fixture
def hooks(bench: Callable[..., Bench]) -> Callable[[Bench], Any]:
    """hooks(case): core's hooks that apply LoRA `a` where a conditioning is evaluated."""
    import comfy.hooks
    import comfy.utils

    def create(case: Bench) -> Any:
        return comfy.hooks.create_hook_lora(comfy.utils.load_torch_file(str(case.paths["a"])), 1.0, 0.0)

    return create


@pytest.mark.core
@pytest.mark.parametrize("loras", [(), (("a", 0.5), ("b", 1.0))], ids=["alone", "over a LoRA"])
def test_lora_hooks(
    bench: Callable[..., Bench], hooks: Callable[[Bench], Any], loras: tuple[tuple[str, float], ...]
) -> None:
    """One condition has the hook and the other has not, so that weights change within a step."""
    case = bench()
    source = case.load()
    before = bits(source)
    hooked = {
        "positive": case.comfy.conditioning(case.model, hooks=hooks(case)),
        "cfg": 3.0,
        "negative": True,
    }
    unhooked = {"cfg": 3.0, "negative": True}
    expected = case.sample(case.lora(source, *loras), **hooked)
    plain = case.sample(case.lora(source, *loras), **unhooked)
    assert not torch.equal(expected, plain)
    unload()
    assert same(bits(source), before)
    patched = case.lora(offload(source, **SETTINGS)[0], *loras)
    for _ in range(2):
        assert torch.equal(case.sample(patched, **hooked), expected)
        check_streams(patched, LORA_A["wan"])
        assert torch.equal(case.sample(patched, **unhooked), plain)
    unload()
    assert same(bits(source), before)


@pytest.mark.parametrize("kind", ["RuntimeError", "InterruptProcessingException"])
def test_an_exception_under_a_hook_leaves_nothing(
    bench: Callable[..., Bench], hooks: Callable[[Bench], Any], kind: str
) -> None:
    """torch calls no hook of a module for an interrupt, which is no Exception."""
    case = bench()
    source = case.load()
    before = bits(source)
    hooked = {"positive": case.comfy.conditioning(case.model, hooks=hooks(case))}
    expected = case.sample(case.lora(source, ("a", 0.5)), **hooked)
    unload()
    patched = case.lora(offload(source, **SETTINGS)[0], ("a", 0.5))

    def fail(*_: Any) -> None:
        raise exception("in a block")

    import comfy.model_management as management

    exception = RuntimeError if kind == "RuntimeError" else management.InterruptProcessingException
    handle = patched.model.diffusion_model.blocks[3].register_forward_hook(fail)
    with pytest.raises(BaseException, match="in a block"):
        case.sample(patched, **hooked)
    handle.remove()
    unload()
    assert same(bits(source), before)
    assert torch.equal(case.sample(patched, **hooked), expected)
