"""What cannot be is refused at the node or said on it, and the next run works."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from int8_node import difference
from sol_node import patch, require_cpu, spy_on, tally_of

pytestmark = pytest.mark.core

KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError
providers = inprocess.pack_module("kernels_glue.attention.providers")
STEPS = 3
SETTINGS = {"dense_steps": 1, "dense_layers": ""}
SPARSE = 2 * 2


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    import comfy.model_management as management

    with torch.inference_mode():
        yield
    management.interrupt_current_processing(False)


@pytest.fixture
def model(tiny: Callable[..., TinyModel]) -> TinyModel:
    return tiny("wan")


@pytest.fixture
def source(comfy: ModuleType, model: TinyModel) -> Any:
    return comfy.load_unet(model.path)


def sample(comfy: ModuleType, patcher: Any, model: TinyModel) -> torch.Tensor:
    return comfy.sample(patcher, model, steps=STEPS)


class Kernel(type(providers.PROVIDERS["reference"])):
    """The reference under another name, which raises at one of its calls."""

    def __init__(self, name: str, raises: BaseException | None = None, at: int = 1):
        self.name = name
        self.calls = 0
        self._raises, self._at = raises, at

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self._raises is not None and self.calls >= self._at:
            raise self._raises
        return super().run(*args, **kwargs)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """kernels(...): what `auto` tries, in this order, and what can be chosen by name."""

    def install(*kernels: Kernel) -> None:
        apply = inprocess.pack_module("kernels_glue.attention.apply")
        monkeypatch.setattr(apply, "auto_order", lambda sm: tuple(kernel.name for kernel in kernels))
        for kernel in kernels:
            monkeypatch.setitem(providers.PROVIDERS, kernel.name, kernel)

    return install


# --- a kernel that raises ------------------------------------------------------------------------


class CompilerError(Exception):
    """Triton's errors are no RuntimeError either."""


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no image for this device\nat"), ValueError("bad stride"), CompilerError("no C compiler")],
)
def test_a_chosen_kernel_that_raises_is_named(
    comfy: ModuleType, source: Any, model: TinyModel, kernels: Any, error: Exception
) -> None:
    broken = Kernel("nvlabs", error, at=3)
    kernels(broken)
    patched, _ = patch(comfy, source, provider="nvlabs", **SETTINGS)
    said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    with pytest.raises(KitchenSolError, match=rf"'nvlabs' failed: {said}\. Choose another provider"):
        sample(comfy, patched, model)
    assert broken.calls == 3
    broken._raises = None
    assert torch.equal(
        sample(comfy, patched, model), sample(comfy, patch(comfy, source, **SETTINGS)[0], model)
    )


def test_auto_goes_on_with_the_next_kernel_and_says_so(
    comfy: ModuleType, source: Any, model: TinyModel, kernels: Any
) -> None:
    broken, spare = Kernel("kitchen", RuntimeError("illegal instruction"), at=2), Kernel("triton")
    kernels(broken, spare)
    expected = sample(comfy, patch(comfy, source, **SETTINGS)[0], model)
    patched, report = patch(comfy, source, provider="auto", **SETTINGS)
    assert report.startswith("sparse: kitchen, else triton; dense: fa")
    assert torch.equal(sample(comfy, patched, model), expected)
    assert (broken.calls, spare.calls) == (2, SPARSE - 1)
    tally = tally_of(patched)
    assert tally.sparse == {"kitchen": 1, "triton": SPARSE - 1}
    assert list(tally.remarks) == [
        "provider kitchen failed and is left alone: RuntimeError: illegal instruction"
    ]
    # The next sampling does not try it again.
    assert torch.equal(sample(comfy, patched, model), expected)
    assert (broken.calls, spare.calls) == (2, 2 * SPARSE - 1)


def test_auto_ends_dense_where_every_kernel_raises(
    comfy: ModuleType, source: Any, model: TinyModel, kernels: Any
) -> None:
    require_cpu()
    kernels(Kernel("kitchen", RuntimeError("broken")), Kernel("triton", TypeError("no such argument")))
    dense = sample(comfy, patch(comfy, source, dense_percent=1)[0], model)
    patched, _ = patch(comfy, source, provider="auto", **SETTINGS)
    assert torch.equal(sample(comfy, patched, model), dense)
    assert len(tally_of(patched).remarks) == 2 and not tally_of(patched).sparse
    strict, _ = patch(comfy, source, provider="auto", strict=True, **SETTINGS)
    with pytest.raises(KitchenSolError, match=r"strict is on .* because of: no Sol kernel for cpu"):
        sample(comfy, strict, model)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("tried to allocate"), RuntimeError("CUDA error: out of memory")]
)
@pytest.mark.parametrize("provider", ["auto", "kitchen"])
def test_out_of_memory_is_not_the_kernels_fault(
    comfy: ModuleType, source: Any, model: TinyModel, kernels: Any, provider: str, error: Exception
) -> None:
    """ComfyUI frees memory at such an error; another kernel would hide it."""
    kernel, spare = Kernel("kitchen", error, at=2), Kernel("triton")
    kernels(kernel, spare)
    patched, _ = patch(comfy, source, provider=provider, **SETTINGS)
    with pytest.raises(type(error), match=str(error)):
        sample(comfy, patched, model)
    assert spare.calls == 0 and not tally_of(patched).remarks
    kernel._raises = None
    sample(comfy, patched, model)
    assert tally_of(patched).sparse == {"kitchen": SPARSE}


def test_an_interrupt_in_the_middle_leaves_the_patch_usable(
    comfy: ModuleType, source: Any, model: TinyModel, kernels: Any
) -> None:
    import comfy.model_management as management

    expected = sample(comfy, patch(comfy, source, **SETTINGS)[0], model)

    class Cancelled(Kernel):
        """Somebody presses Cancel while it computes its third call; core looks at the next layer."""

        def run(self, *args: Any, **kwargs: Any) -> Any:
            management.interrupt_current_processing(self.calls == 2)
            return super().run(*args, **kwargs)

    kernels(Cancelled("kitchen"))
    patched, _ = patch(comfy, source, provider="auto", **SETTINGS)
    with pytest.raises(management.InterruptProcessingException):
        sample(comfy, patched, model)
    assert tally_of(patched).sparse == {"kitchen": 3}
    assert torch.equal(sample(comfy, patched, model), expected)
    assert tally_of(patched).sparse == {"kitchen": SPARSE}


# --- strict --------------------------------------------------------------------------------------


def test_strict_lets_everything_pass_that_the_settings_ask_for(
    comfy: ModuleType, source: Any, model: TinyModel
) -> None:
    settings = {"strict": True, "dense_steps": 1, "dense_layers": "0"}
    strict, _ = patch(comfy, source, **settings)
    relaxed, _ = patch(comfy, source, **{**settings, "strict": False})
    assert torch.equal(sample(comfy, strict, model), sample(comfy, relaxed, model))
    short, _ = patch(comfy, source, min_tokens=1000, **{**settings, "dense_layers": ""})
    sample(comfy, short, model)
    assert tally_of(strict).reasons == {"dense step": 2, "dense layer": 2, "cross-attention": 6}
    assert tally_of(short).reasons == {"dense step": 2, "fewer than 1000 tokens": 4, "cross-attention": 6}


def test_strict_stops_where_auto_finds_no_kernel(comfy: ModuleType, source: Any, model: TinyModel) -> None:
    require_cpu()
    relaxed, report = patch(comfy, source, provider="auto", **SETTINGS)
    assert report.startswith("sparse: nothing, no Sol kernel can run here; dense: fa")
    assert "- not used: kitchen (" in report
    sample(comfy, relaxed, model)
    assert tally_of(relaxed).reasons["no Sol kernel for cpu"] == SPARSE
    strict, _ = patch(comfy, source, provider="auto", strict=True, **SETTINGS)
    with pytest.raises(KitchenSolError, match=r"because of: no Sol kernel for cpu .*Turn strict off"):
        sample(comfy, strict, model)


# --- refused at the node -------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["kitchen", "nvlabs", "triton"])
def test_a_chosen_kernel_that_is_not_here_is_refused(comfy: ModuleType, source: Any, provider: str) -> None:
    require_cpu()
    message = rf"provider {provider} cannot run on cpu: .+\. Choose auto or another provider\.$"
    with pytest.raises(KitchenSolError, match=message) as refusal:
        patch(comfy, source, provider=provider)
    assert "install" in str(refusal.value) or "GPU" in str(refusal.value) or "CPU" in str(refusal.value)


@pytest.mark.parametrize("backend", ["sage_attn", "kitchen_int8"])
def test_a_chosen_backend_that_is_not_here_is_refused(comfy: ModuleType, source: Any, backend: str) -> None:
    require_cpu()
    message = rf"dense_backend {backend} cannot run on cpu: .*needs a .*GPU.* Choose fa or current\.$"
    with pytest.raises(KitchenSolError, match=message):
        patch(comfy, source, dense_backend=backend)


@pytest.mark.parametrize(
    ("settings", "lacks"),
    [({"kv_splits": "4"}, "kv_splits (4 asked)"), ({"token_aug": 64}, "token_aug (64 asked)")],
)
def test_an_option_that_the_kernel_lacks_is_refused(
    comfy: ModuleType, source: Any, settings: dict[str, Any], lacks: str
) -> None:
    message = rf"provider reference lacks what was asked: has no {re.escape(lacks)}\. Set it back"
    with pytest.raises(KitchenSolError, match=message):
        patch(comfy, source, **settings)


def test_auto_leaves_a_kernel_aside_that_lacks_an_option_and_a_choice_of_it_is_refused(
    comfy: ModuleType, source: Any, monkeypatch: pytest.MonkeyPatch, kernels: Any
) -> None:
    """`exact` is the reference's; the other kernel has none."""
    poor, rich = Kernel("kitchen"), Kernel("triton")
    monkeypatch.setattr(
        poor, "unsupported", lambda options: "has no exact" if options.thresh_type == "exact" else ""
    )
    kernels(poor, rich)
    _, report = patch(comfy, source, provider="auto", thresh_type="exact")
    assert report.startswith("sparse: triton; dense: fa") and "- not used: kitchen (has no exact)" in report
    assert patch(comfy, source, provider="auto")[1].startswith("sparse: kitchen, else triton;")
    with pytest.raises(
        KitchenSolError, match=r"provider kitchen lacks what was asked: has no exact\. Set it"
    ):
        patch(comfy, source, provider="kitchen", thresh_type="exact")


def test_a_range_behind_the_sequence_stops_the_sampling(
    comfy: ModuleType, source: Any, model: TinyModel
) -> None:
    patched, _ = patch(comfy, source, sink_start=30, sink_tokens=5, **SETTINGS)
    with pytest.raises(KitchenSolError, match=r"sink_start 30 and sink_tokens 5 reach behind the 32 tokens"):
        sample(comfy, patched, model)


# --- said on the node ----------------------------------------------------------------------------


def test_a_unet_passes_through(comfy: ModuleType, tiny: Callable[..., TinyModel]) -> None:
    model = tiny("sdxl")
    source = comfy.load_unet(model.path)
    bits = comfy.sample(source, model, steps=1)
    patched, report = patch(comfy, source, strict=True)
    assert report.startswith("passed through unchanged: this model has no transformer blocks")
    assert torch.equal(comfy.sample(patched, model, steps=1), bits)
    assert not patched.callbacks or not any("kitchen_sol_attention" in k for k in patched.callbacks.values())


def test_a_schedule_that_leaves_nothing_sparse_warns(
    comfy: ModuleType, source: Any, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps of a distilled model, and a shift that keeps the noise high to the end."""
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    spy = spy_on(monkeypatch)
    _, report = patch(comfy, source, dense_steps=4, steps=4)
    assert report.startswith("WARNING: with 4 steps (simple): all 4 steps are dense; lower dense_steps")
    assert "3 of 4 steps sparse" in patch(comfy, source, dense_percent=0.2, steps=4)[1]
    shifted = comfy.run_node(ModelSamplingSD3, model=source, shift=50.0)[0]
    patched, report = patch(comfy, shifted, dense_percent=0.9, steps=4)
    assert report.startswith("WARNING: with 4 steps (simple): all 4 steps are dense; lower dense_percent")
    comfy.sample(patched, model, steps=4)
    assert spy.count == 0 and tally_of(patched).reasons["dense step"] == 4 * 2
    # 20 steps reach further down, which counts and not what the picture was drawn for.
    comfy.sample(patched, model, steps=20)
    assert spy.count == 2
    assert difference(comfy.sample(patched, model, steps=4), comfy.sample(shifted, model, steps=4)) < 1e-5


def test_a_range_by_hand_matters_only_where_a_call_would_be_sparse(
    comfy: ModuleType, source: Any, model: TinyModel
) -> None:
    behind = {"sink_start": 1_000, "sink_tokens": 64, "dense_backend": "current", **SETTINGS}
    short, _ = patch(comfy, source, min_tokens=10_000, **behind)
    assert torch.equal(sample(comfy, short, model), sample(comfy, source, model))
    long_enough, _ = patch(comfy, source, **behind)
    with pytest.raises(KitchenSolError, match="sink_start 1000 and sink_tokens 64 reach behind"):
        sample(comfy, long_enough, model)
