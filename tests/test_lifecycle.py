"""What lives how long: sources and results are released, conversions are reused, copies stand alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import builders, startup
from comfyui.builders import TinyModel
from comfyui.graphs import sampling_graph
from comfyui.server import ComfyServer
from int8_node import DEFAULTS, LORA_A, NODE_ID, QUANTIZE_OP, difference, int8_layers, on_quantize, quantize

MakeTiny = Callable[..., TinyModel]
Load = Callable[[], Any]


@pytest.fixture(autouse=True)
def as_in_a_node() -> Iterator[None]:
    """ComfyUI's executor runs nodes, loaders and samplers under inference mode."""
    with torch.inference_mode():
        yield


@pytest.fixture
def model(tiny: MakeTiny) -> TinyModel:
    return tiny("wan")


@pytest.fixture
def load(comfy: ModuleType, model: TinyModel) -> Load:
    """Loads the model anew, with no other test's copies about."""
    comfy.unload_all()
    return lambda: comfy.load_unet(model.path)


@pytest.fixture
def lora(model: TinyModel, tmp_path: Path) -> Path:
    builders.write_lora(tmp_path / "lora.safetensors", model, LORA_A["wan"])
    return tmp_path / "lora.safetensors"


@pytest.fixture
def quantizations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one entry, its running number, before each weight is quantized."""
    numbers: list[int] = []
    on_quantize(monkeypatch, lambda: numbers.append(len(numbers) + 1))
    return numbers


def sample(comfy: ModuleType, patcher: Any, model: TinyModel) -> torch.Tensor:
    return comfy.sample(patcher, model, steps=1)


def alive(reference: weakref.ref[Any]) -> bool:
    gc.collect()
    return reference() is not None


# --- release --------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    "use", ["untouched", "source sampled", "sampled", "cloned", "LoRA kept", "LoRA baked"]
)
def test_the_source_is_released_while_the_result_lives(
    comfy: ModuleType, model: TinyModel, load: Load, lora: Path, use: str
) -> None:
    source = load()
    if use == "source sampled":
        sample(comfy, source, model)
    patched = comfy.apply_lora(source, lora, 1.0) if use.startswith("LoRA") else source
    quantized, _ = quantize(comfy, patched, lora="bake" if use == "LoRA baked" else "keep")
    clones = [quantized.clone(), quantized.clone()] if use == "cloned" else []
    bits = sample(comfy, quantized, model) if use not in ("untouched", "source sampled") else None
    released = weakref.ref(source.model)
    del source, patched
    assert not alive(released)
    again = [sample(comfy, patcher, model) for patcher in (quantized, *clones)]
    assert all(torch.equal(samples, again[0] if bits is None else bits) for samples in again)


@pytest.mark.core
def test_the_result_is_released_with_its_patchers_and_the_source(
    comfy: ModuleType, model: TinyModel, load: Load, lora: Path
) -> None:
    source = load()
    quantized, _ = quantize(comfy, source)
    with_lora = comfy.apply_lora(quantized, lora, 1.0)
    sample(comfy, with_lora, model)
    released = weakref.ref(quantized.model)
    del quantized, source
    assert alive(released), "the clone with the LoRA still uses it"
    del with_lora
    assert not alive(released)


@pytest.mark.core
def test_core_can_unload_a_result_whose_patchers_are_gone(
    comfy: ModuleType, model: TinyModel, load: Load, lora: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The conversion is kept for the next run; core must know whom to ask for the memory until then."""
    import comfy.model_management as management

    source = load()
    for strength in (1.0, 0.5):
        patched = comfy.apply_lora(source, lora, strength)
        sample(comfy, comfy.apply_lora(quantize(comfy, patched)[0], lora, 1.0), model)
    gc.collect()
    assert not [loaded for loaded in management.current_loaded_models if loaded.model is None]
    sample(comfy, source, model)
    assert "memory leak" not in caplog.text
    comfy.unload_all()
    assert management.current_loaded_models == []


@pytest.mark.core
def test_another_group_size_releases_the_old_result(comfy: ModuleType, model: TinyModel, load: Load) -> None:
    source = load()
    quantized, _ = quantize(comfy, source, group_size="256")
    bits = sample(comfy, quantized, model)
    released = weakref.ref(quantized.model)
    quantized, _ = quantize(comfy, source, group_size="64")
    assert not alive(released)
    other, _ = quantize(comfy, source, unique_id="2", group_size="16")
    kept = weakref.ref(quantized.model)
    del quantized, other
    assert alive(kept), "the conversion of another node is none of its business"
    assert torch.equal(sample(comfy, quantize(comfy, source, group_size="256")[0], model), bits)


# --- reuse ----------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_changed_lora_does_not_quantize_again(
    comfy: ModuleType, model: TinyModel, load: Load, lora: Path, quantizations: list[int]
) -> None:
    source = load()
    quantized, _ = quantize(comfy, source)
    layers = len(int8_layers(quantized))
    # The first run in a process also looks at the numbers of the kernel, which quantizes a weight or two.
    assert layers <= len(quantizations) <= layers + 3
    quantizations.clear()
    plain = sample(comfy, quantized, model)
    for strength in (1.0, 0.5):
        after = sample(comfy, comfy.apply_lora(quantized, lora, strength), model)
        before = quantize(comfy, comfy.apply_lora(source, lora, strength))[0]
        assert torch.equal(sample(comfy, before, model), after)
        assert difference(after, plain) > 0.05
    assert not quantizations
    quantize(comfy, comfy.apply_lora(source, lora, 1.0), lora="bake")
    assert len(quantizations) == layers, "baking another LoRA must quantize"


@pytest.mark.core
def test_two_nodes_with_the_same_settings_share_one_conversion(
    comfy: ModuleType, load: Load, quantizations: list[int]
) -> None:
    source = load()
    first, _ = quantize(comfy, source, unique_id="1")
    quantizations.clear()
    second, _ = quantize(comfy, source, unique_id="2")
    assert second.model is first.model and not quantizations
    quantize(comfy, source, unique_id="3", group_size="64")
    assert len(quantizations) >= len(int8_layers(first)), "the list does see a conversion"


@pytest.mark.parametrize("cache", ["default", "--cache-classic"])
def test_the_server_quantizes_once_for_three_prompts(
    comfy: ModuleType, model: TinyModel, lora: Path, tmp_path: Path, cache: str
) -> None:
    calls = tmp_path / "calls.txt"
    spy = tmp_path / "server" / "custom_nodes" / "quantize_spy"
    spy.mkdir(parents=True)
    (spy / "__init__.py").write_text(SPY.format(path=str(calls), op=QUANTIZE_OP))
    extra = [] if cache == "default" else [cache]
    with ComfyServer(tmp_path / "server", device_args=startup.comfyui_args(), extra_args=extra) as server:
        server.add_model(model)
        name = server.add_lora(lora)

        def count_after(before: float, after: float) -> int:
            chain = [
                ("LoraLoaderModelOnly", {"lora_name": name, "strength_model": before}),
                (NODE_ID, DEFAULTS),
                ("LoraLoaderModelOnly", {"lora_name": name, "strength_model": after}),
            ]
            server.run(sampling_graph(model, model_nodes=chain, steps=1)).raise_for_errors()
            return len(calls.read_text().splitlines())

        first = count_after(1.0, 0.2)
        layers = len(int8_layers(quantize(comfy, comfy.load_unet(model.path))[0]))
        assert layers <= first <= layers + 3
        assert count_after(0.5, 0.2) == first
        assert count_after(0.5, 0.3) == first
        assert "memory leak" not in server.log()


SPY = """
from comfy_kitchen.registry import registry

def observed(real):
    def call(*args, stochastic_rounding=0, **kwargs):
        if not stochastic_rounding:
            with open({path!r}, "a") as calls:
                calls.write("call\\n")
        return real(*args, stochastic_rounding=stochastic_rounding, **kwargs)
    return call

for backend in registry._backends.values():
    if hasattr(backend, {op!r}):
        setattr(backend, {op!r}, observed(getattr(backend, {op!r})))

NODE_CLASS_MAPPINGS = {{}}
"""


# --- copies ---------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    "clone": lambda p: p.clone(),
    "clone(disable_dynamic)": lambda p: p.clone(disable_dynamic=True),
    "clone(force_deepcopy)": lambda p: p.clone(force_deepcopy=True),
    "init()": lambda p: p.cached_patcher_init[0](*p.cached_patcher_init[1]),
    "init(disable_dynamic=False)": lambda p: p.cached_patcher_init[0](
        *p.cached_patcher_init[1], disable_dynamic=False
    ),
    "init(disable_dynamic=True)": lambda p: p.cached_patcher_init[0](
        *p.cached_patcher_init[1], disable_dynamic=True
    ),
    "override": lambda p: p.clone(model_override=p.get_clone_model_override()),
    "multigpu": lambda p: p.deepclone_multigpu(),
}


@pytest.mark.core
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_copies_outlive_the_first_and_the_source(
    comfy: ModuleType, model: TinyModel, load: Load, lora: Path, how: str
) -> None:
    source = load()
    first, _ = quantize(comfy, source)
    bits = sample(comfy, first, model)
    with_lora = sample(comfy, comfy.apply_lora(first, lora, 1.0), model)
    # The copy is made while the LoRA is still patched into the weights of the first.
    second = COPIES[how](first)
    third = COPIES[how](second)
    shares = third.model is first.model
    # Core keeps the patcher that was copied alive as the parent; the copy must not need it.
    third.parent = None
    models = [weakref.ref(patcher.model) for patcher in (source, first)]
    del source, first, second
    assert [alive(reference) for reference in models] == [False, shares]
    assert not (how.endswith("(disable_dynamic)") and third.is_dynamic())
    assert len(int8_layers(third)) == 20
    assert torch.equal(sample(comfy, third, model), bits)
    assert torch.equal(sample(comfy, comfy.apply_lora(third, lora, 1.0), model), with_lora)


# --- what the source carries ----------------------------------------------------------------------


@pytest.mark.core
def test_options_wrappers_and_callbacks_survive(comfy: ModuleType, model: TinyModel, load: Load) -> None:
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    calls: list[str] = []
    source = load().clone()
    source.model_options["transformer_options"]["mine"] = {"value": 3}
    source.set_model_sampler_cfg_function(lambda args: calls.append("cfg") or args["cond"])
    source.add_callback_with_key(CallbacksMP.ON_PRE_RUN, "mine", lambda *_: calls.append("pre_run"))

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("diffusion_model")
        options = kwargs.get("transformer_options") or next(
            a for a in args if isinstance(a, dict) and "mine" in a
        )
        assert options["mine"] == {"value": 3}
        return executor(*args, **kwargs)

    source.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "mine", wrapper)
    quantized, _ = quantize(comfy, source)
    comfy.sample(quantized, model, steps=2)
    assert sorted(calls) == ["cfg"] * 2 + ["diffusion_model"] * 2 + ["pre_run"]


@pytest.mark.core
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_a_sampling_patch_before_the_node_gives_the_bits_of_one_after_it(
    comfy: ModuleType, tiny: MakeTiny, family: str
) -> None:
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux, ModelSamplingSD3

    comfy.unload_all()
    model = tiny(family)

    def patched(patcher: Any) -> Any:
        if family == "wan":
            return ModelSamplingSD3().patch(patcher, shift=9.0)[0]
        return ModelSamplingFlux().patch(patcher, 3.0, 0.5, 512, 512)[0]

    source = comfy.load_unet(model.path)
    quantized, _ = quantize(comfy, source)
    before, _ = quantize(comfy, patched(source))
    plain, expected = (comfy.sample(p, model, steps=3) for p in (quantized, patched(quantized)))
    assert torch.equal(comfy.sample(before, model, steps=3), expected)
    assert difference(expected, plain) > 0.02
