"""Every form of an attention call, made through ComfyUI's own attention functions.

A dense call must give what core gives, a sparse one what the reference gives for the same tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfyui import inprocess
from int8_node import difference
from sol_data import smooth_qkv
from sol_node import OVERRIDE, spy_on

pytestmark = pytest.mark.core

reference = inprocess.pack_module("kernels_glue.attention.reference")
SolConfig = inprocess.pack_module("kernels_glue.attention.config").SolConfig
evaluation = inprocess.pack_module("kernels_glue.attention.evaluation")
layers = inprocess.pack_module("kernels_glue.attention.layers")
override = inprocess.pack_module("kernels_glue.attention.override")
providers = inprocess.pack_module("kernels_glue.attention.providers")
routing = inprocess.pack_module("kernels_glue.attention.routing")
schedule = inprocess.pack_module("kernels_glue.attention.schedule")
sinks = inprocess.pack_module("kernels_glue.attention.sinks")
Tally = inprocess.pack_module("kernels_glue.attention.tally").Tally
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError

B, H, T, D = 2, 2, 270, 128  # five blocks of keys, the last one short
SHAPES = list(itertools.product((False, True), repeat=2))


class Container:
    """A tensor that is handed over: `take` empties it."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor: torch.Tensor | None = tensor

    def peek(self) -> torch.Tensor:
        assert self.tensor is not None, "consumed"
        return self.tensor

    def take(self) -> torch.Tensor:
        tensor, self.tensor = self.peek(), None
        return tensor


class Attention:
    """An override as the node installs it, with one evaluation of one layer around each call."""

    def __init__(
        self,
        *,
        dense: bool = False,
        earlier: Any = None,
        provider: Any = None,
        rows: tuple[int, int] = (0, 0),
        sink_queries: bool = False,
        **settings: Any,
    ):
        self.tally = Tally()
        config = SolConfig.of({"provider": "reference", **settings})
        router = routing.Router([provider or providers.PROVIDERS["reference"]], 0)
        self.running: Any = None
        self.override = override.SolOverride(
            config, router, earlier, lambda: self.tally, lambda: self.running
        )
        self._step = schedule.Step(0, dense, config.tau)
        self._rule = sinks.SinkRule(rows, True, sink_queries)

    def options(self) -> dict[str, Any]:
        counter = layers.LayerCounter((("blocks", 1),), indexed=False)
        self.running = evaluation.Evaluation(
            self._step, layers.LayerSet(frozenset()), counter, self._rule, lambda tokens: (0, 0), 0
        )
        return {OVERRIDE: self.override}

    def __call__(self, *args: Any, function: Any = None, **kwargs: Any) -> torch.Tensor:
        return (function or core())(*args, transformer_options=self.options(), **kwargs)


def core() -> Callable[..., torch.Tensor]:
    from comfy.ldm.modules.attention import attention_pytorch

    return attention_pytorch


def qkv(dtype: torch.dtype = torch.float32, tokens: int = T) -> tuple[torch.Tensor, ...]:
    """q, k and v [B, T, H, D]."""
    return smooth_qkv(tokens, heads=H, head_dim=D, batch=B, dtype=dtype)


def shaped(tensors: Any, skip_reshape: bool) -> tuple[torch.Tensor, ...]:
    return tuple(t.transpose(1, 2) if skip_reshape else t.flatten(2) for t in tensors)


def expected_form(out: torch.Tensor, skip_output_reshape: bool) -> torch.Tensor:
    """[B, T, H, D] as the model asked for it."""
    return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)


def masks() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    seen = torch.rand(B, H, T, T, generator=generator) > 0.3
    bias = torch.randn(B, H, T, T, generator=generator)
    return {
        "2 dims": bias[0, 0],
        "3 dims": bias[:, 0],
        "4 dims": bias,
        "4 dims, one head": bias[:, :1],
        "bool, 2 dims": seen[0, 0],
        "bool, 4 dims": seen,
    }


# --- dense calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["fa", "current"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("skip_reshape", "skip_output_reshape"), SHAPES)
def test_a_dense_call_gives_the_bits_of_core(
    skip_reshape: bool, skip_output_reshape: bool, dtype: torch.dtype, backend: str
) -> None:
    tensors = shaped(qkv(dtype), skip_reshape)
    copies = [t.clone() for t in tensors]
    form = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    attention = Attention(dense=True, dense_backend=backend)
    for options in ({}, {"scale": 0.03}, {"attn_precision": torch.float32}, {"enable_gqa": True}):
        expected = core()(*tensors, H, **form, **options)
        assert torch.equal(attention(*tensors, H, **form, **options), expected)
        names = dict(zip(("q", "k", "v"), tensors, strict=True))
        assert torch.equal(attention(**names, heads=H, mask=None, **form, **options), expected)
    # All by position, as core's signature has it.
    assert torch.equal(
        attention(*tensors, H, None, None, skip_reshape, skip_output_reshape), core()(*tensors, H, **form)
    )
    assert all(torch.equal(t, copy) for t, copy in zip(tensors, copies, strict=True))
    assert attention.tally.reasons == {"dense step": 9} and not attention.tally.sparse


@pytest.mark.parametrize("backend", ["fa", "current"])
@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("skip_reshape", [False, True])
def test_a_mask_keeps_a_call_dense_and_is_obeyed(skip_reshape: bool, name: str, backend: str) -> None:
    tensors, mask = shaped(qkv(), skip_reshape), masks()[name]
    kept = mask.clone()
    form = {"skip_reshape": skip_reshape}
    expected = core()(*tensors, H, mask, **form)
    assert difference(expected, core()(*tensors, H, **form)) > 0.05
    attention = Attention(dense_backend=backend)
    for out in (
        attention(*tensors, H, mask, **form),  # by position, as some models give it
        attention(*tensors, H, mask=mask, **form),
        attention(*tensors, heads=H, mask=mask, **form),
    ):
        assert torch.equal(out, expected)
    assert torch.equal(mask, kept)
    assert attention.tally.reasons == {"mask": 3} and not attention.tally.sparse


@pytest.mark.parametrize("skip_reshape", [False, True])
def test_fewer_key_heads_are_grouped(skip_reshape: bool) -> None:
    q, k, v = qkv()
    q = torch.cat([q, q.flip(1)], dim=2)  # four heads over two
    wide = [t.repeat_interleave(2, dim=2).transpose(1, 2) for t in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), *wide)
    attention = Attention(tau=1.0)
    out = attention(*shaped((q, k, v), skip_reshape), 2 * H, enable_gqa=True, skip_reshape=skip_reshape)
    assert difference(out, expected.transpose(1, 2).flatten(2)) < 1e-5
    assert attention.tally.reasons == {"grouped heads": 1}


@pytest.mark.parametrize("backend", ["fa", "sage_attn", "kitchen_int8", "current"])
def test_a_call_that_asks_for_full_precision_is_neither_sparse_nor_quantized(backend: str) -> None:
    """LTX sets it. fp16, which the quantized backends would take."""
    tensors = shaped(qkv(torch.float16), True)
    options = {"skip_reshape": True, "low_precision_attention": False}
    attention = Attention(dense_backend=backend)
    assert torch.equal(attention(*tensors, H, **options), core()(*tensors, H, **options))
    assert attention.tally.reasons == {"the model asks for full precision": 1}
    refused = {} if backend in ("fa", "current") else {f"{backend}: the model asks for full precision": 1}
    assert attention.tally.refused == refused
    # The same call without that wish is sparse.
    attention(*tensors, H, skip_reshape=True, low_precision_attention=True)
    assert attention.tally.sparse == {"reference": 1}


@pytest.mark.parametrize("name", ["is_causal", "causal"])
def test_a_causal_call_is_dense_and_causal(name: str) -> None:
    tensors = shaped(qkv(), True)
    attention = Attention()
    out = attention(*tensors, H, skip_reshape=True, skip_output_reshape=True, **{name: True})
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    assert difference(out, expected) < 1e-6
    assert attention.tally.reasons == {"causal": 1}


@pytest.mark.parametrize("keys", [T - 1, T + 64, 16])
def test_other_keys_than_queries_are_cross_attention(keys: int) -> None:
    q, k, v = (t.flatten(2) for t in (qkv()[0], *qkv(tokens=keys)[1:]))
    attention = Attention(strict=True)  # expected, so that strict lets it pass
    assert torch.equal(attention(q, k, v, H), core()(q, k, v, H))
    assert attention.tally.reasons == {"cross-attention": 1}


def test_a_call_outside_of_an_evaluation_is_dense() -> None:
    tensors = shaped(qkv(), False)
    attention = Attention(strict=True)
    out = core()(*tensors, H, transformer_options={OVERRIDE: attention.override})
    assert torch.equal(out, core()(*tensors, H))
    assert attention.tally.reasons == {"text block or outside of the blocks": 1}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": torch.zeros(T, T)}, "mask"),
        ({"is_causal": True}, "causal"),
        ({"low_precision_attention": False}, "the model asks for full precision"),
    ],
)
def test_strict_names_what_is_in_the_way(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(KitchenSolError, match=f"strict is on .* because of: {reason} .*Turn strict off"):
        Attention(strict=True)(*shaped(qkv(), False), H, **options)


# --- sparse calls --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)]
)
@pytest.mark.parametrize(("skip_reshape", "skip_output_reshape"), SHAPES)
def test_a_sparse_call_gives_the_reference(
    skip_reshape: bool, skip_output_reshape: bool, dtype: torch.dtype, tolerance: float
) -> None:
    plain = qkv(dtype)
    tensors = shaped(plain, skip_reshape)
    copies = [t.clone() for t in tensors]
    form = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    everything = Attention(tau=-100)(*tensors, H, **form)
    exact = core()(*tensors, H, **form)
    assert difference(everything, exact) < tolerance  # rounding of the dtype
    for options in ({}, {"scale": 0.03}, {"enable_gqa": True}, {"mask": None}):
        result = reference.sol_rowwise(*plain, tau=1.0, scale=options.get("scale"))
        attention = Attention(tau=1.0)
        out = attention(*tensors, H, **form, **options)
        assert torch.equal(out, expected_form(result.out, skip_output_reshape))
        assert attention.tally.sparse == {"reference": 1}
        assert attention.tally.density() == pytest.approx(float(result.density)) and result.density < 0.9
    assert difference(Attention(tau=1.0)(*tensors, H, **form), exact) > 0.03
    assert all(torch.equal(t, copy) for t, copy in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("backend", ["fa", "current"])
@pytest.mark.parametrize(
    ("kind", "by_name"),
    [("list", False), ("list", True), ("container", False), ("container", True), ("core's container", False)],
)
@pytest.mark.parametrize("dense", [False, True])
def test_a_wrapped_tensor_is_read_and_left_in_its_wrapper(
    dense: bool, by_name: bool, kind: str, backend: str
) -> None:
    """As a pack for little memory gives them. Core itself empties its own containers before it calls an
    override."""
    import comfy.ldm.modules.attention as module

    wrap: Callable[[torch.Tensor], Any] = {"list": lambda t: [t], "container": Container}.get(
        kind
    ) or getattr(module, "AttentionTensorContainer", None)
    if wrap is None:
        pytest.skip("this ComfyUI has no containers")
    plain = qkv()
    tensors = shaped(plain, True)
    wrapped = [wrap(t) for t in tensors]
    attention = Attention(dense=dense, dense_backend=backend)
    if by_name:
        names = dict(zip(("q", "k", "v"), wrapped, strict=True))
        out = attention(**names, heads=H, skip_reshape=True)
    else:
        out = attention(*wrapped, H, skip_reshape=True)
    if dense:
        assert torch.equal(out, core()(*tensors, H, skip_reshape=True))
    else:
        assert torch.equal(out, reference.sol_rowwise(*plain).out.flatten(2))
    if kind == "list":
        assert all(len(w) == 1 and w[0] is t for w, t in zip(wrapped, tensors, strict=True))
    elif kind == "container":
        assert all(w.peek() is t for w, t in zip(wrapped, tensors, strict=True))


@pytest.mark.parametrize("backend", ["fa", "current"])
@pytest.mark.parametrize(("skip_reshape", "skip_output_reshape"), SHAPES)
def test_query_sinks_of_a_kernel_without_them_are_dense_rows(
    monkeypatch: pytest.MonkeyPatch, skip_reshape: bool, skip_output_reshape: bool, backend: str
) -> None:
    kernel = type(providers.PROVIDERS["reference"])()
    run = kernel.run
    kernel.exact_queries = False

    def without_queries(q: Any, k: Any, v: Any, options: Any) -> Any:
        keys_only = type(options)(options.tau, options.scale, sink_keys=options.sink_keys)
        return run(q, k, v, keys_only)

    monkeypatch.setattr(kernel, "run", without_queries)
    plain, rows = qkv(), (10, 75)
    form = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    attention = Attention(provider=kernel, rows=rows, sink_queries=True, dense_backend=backend)
    out = attention(*shaped(plain, skip_reshape), H, None, **form, scale=0.05)
    expected = reference.sol_rowwise(*plain, scale=0.05, sink_keys=rows, sink_queries=rows).out
    assert difference(out, expected_form(expected, skip_output_reshape)) < 1e-5
    without = reference.sol_rowwise(*plain, scale=0.05, sink_keys=rows).out
    assert difference(expected, without) > 1e-3
    assert (attention.tally.sparse, attention.tally.dense) == ({"reference": 1}, {})


@pytest.mark.parametrize(("has_splits", "splits"), [(True, 4), (False, 1)])
def test_automatic_kv_splits_are_for_the_kernels_that_have_them(
    monkeypatch: pytest.MonkeyPatch, has_splits: bool, splits: int
) -> None:
    """On SM 9.0 and at a length at which `auto` means 4."""
    rule = override.kv_splits_for
    monkeypatch.setattr(override, "sm_of", lambda device: (9, 0))
    monkeypatch.setattr(override, "kv_splits_for", lambda choice, sm, n: rule(choice, sm, n + 65536))
    if has_splits:
        monkeypatch.setattr(providers.PROVIDERS["reference"], "unsupported", lambda options: "")
    spy = spy_on(monkeypatch)
    attention = Attention(tau=0.7, thresh_type="exact", rows=(3, 40))
    attention(*shaped(qkv(), False), H)
    assert attention.tally.sparse == {"reference": 1}
    [(_, asked)] = spy.calls
    assert (asked.kv_splits, asked.tau, asked.thresh_type, asked.sink_keys) == (splits, 0.7, "exact", (3, 40))


# --- other attention functions -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention_basic", "attention_sub_quad", "attention_split"])
def test_every_wrapped_function_of_core_can_be_overridden_and_used(name: str) -> None:
    import comfy.ldm.modules.attention as module

    function = getattr(module, name)
    plain = qkv()
    tensors = shaped(plain, False)
    current = Attention(dense=True, dense_backend="current")
    assert torch.equal(current(*tensors, H, function=function), function(*tensors, H))
    assert current.tally.dense == {f"attention.{name}": 1}
    sparse = Attention()(*tensors, H, function=function)
    assert torch.equal(sparse, reference.sol_rowwise(*plain).out.flatten(2))


@pytest.mark.parametrize("earlier", [False, True])
def test_current_passes_everything_on_and_is_not_called_again_from_inside(earlier: bool) -> None:
    """A backend that calls another wrapped one, as core's own do, must not come back to the override."""
    from comfy.ldm.modules.attention import wrap_attn

    seen: list[dict[str, Any]] = []

    @wrap_attn
    def backend(q: Any, k: Any, v: Any, heads: int, mask: Any = None, **kwargs: Any) -> torch.Tensor:
        seen.append(kwargs)
        return core()(q, k, v, heads, mask=mask, **kwargs)

    def before(function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * function(*args, **kwargs)

    tensors, flavour = shaped(qkv(), False), object()
    attention = Attention(dense=True, dense_backend="current", earlier=before if earlier else None)
    options = attention.options()
    out = backend(*tensors, H, flavour=flavour, transformer_options=options)
    assert torch.equal(out, core()(*tensors, H) * (2 if earlier else 1))
    assert len(seen) == 1 and attention.tally.calls == 1
    assert seen[0]["flavour"] is flavour and seen[0]["transformer_options"] is options
    name = "before" if earlier else "backend"
    assert [kernel.rpartition(".")[2] for kernel in attention.tally.dense] == [name]
