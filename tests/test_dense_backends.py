"""The dense backends `fa` and `kitchen_int8` on the CPU; FlashAttention packages are doubled."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from dense_checks import call_of, error, exact, qkv, read_call

dense = inprocess.pack_module("kernels_glue.attention.dense")
strides = inprocess.pack_module("kernels_glue.attention.strides")
flash = inprocess.pack_module("kernels_glue.attention.dense.flash_packages")
kitchen_int8 = inprocess.pack_module("kernels_glue.attention.dense.kitchen_int8")
sdpa = inprocess.pack_module("kernels_glue.attention.dense.sdpa")
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16
FA = dense.BACKENDS["fa"]
KITCHEN = dense.BACKENDS["kitchen_int8"]


def test_the_table_holds_each_backend_by_its_name() -> None:
    assert list(dense.BACKENDS) == ["fa", "sage_attn", "kitchen_int8"]
    assert all(backend.name == name for name, backend in dense.BACKENDS.items())


# --- fa on the CPU: as ComfyUI computes ----------------------------------------------------------

B, H, T, K, D = 2, 4, 13, 9, 16


def _mask(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    if dtype != torch.bool:
        return mask.to(dtype)
    mask = mask > 0
    mask[..., 0] = True  # a query that sees nothing has no defined result
    return mask


MASKS = [None, (T, K), (B, T, K), (1, T, K), (B, H, T, K), (B, 1, T, K), (1, 1, 1, K)]


@pytest.mark.core
@pytest.mark.parametrize("flat", [True, False], ids=["BTC", "BHTD"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.5}, {"enable_gqa": True}, {"enable_gqa": False}])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_fa_has_the_bits_of_core(
    flat: bool, options: dict[str, Any], mask: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    from comfy.ldm.modules.attention import attention_pytorch

    if options.get("enable_gqa") and mask and not _core_takes_grouped_masks():
        pytest.skip("this torch has no grouped heads with a mask")
    key_heads = 2 if options.get("enable_gqa") else H
    tensors = qkv(B, H, T, D, keys=K, key_heads=key_heads, dtype=dtype)
    if flat:
        tensors = tuple(t.transpose(1, 2).flatten(2) for t in tensors)
    layout = {} if flat else {"skip_reshape": True, "skip_output_reshape": True}
    for kind in [dtype, torch.bool] if mask else [dtype]:
        arguments = (*tensors, H, None if mask is None else _mask(mask, kind))
        call = read_call(*arguments, **layout, **options)
        assert FA.missing(CPU) == FA.unfit(call) == ""
        result = FA.run(call)
        assert result.kernel == "SDPA"
        assert torch.equal(call.output(result.out), attention_pytorch(*arguments, **layout, **options))


def _core_takes_grouped_masks() -> bool:
    try:
        q, k, v = qkv(1, 2, 3, 8, key_heads=1)
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=q[..., :3], enable_gqa=True)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_fa_against_the_definition(mask: tuple[int, ...] | None, kind: torch.dtype) -> None:
    q, k, v = qkv(B, H, T, D, keys=K)
    made = None if mask is None else _mask(mask, kind)
    # [B, T, K] means a mask a sample, which is [B, 1, T, K].
    seen = made.unsqueeze(1) if made is not None and made.ndim == 3 else made
    expected = exact(q, k, v, seen, scale=0.3)
    assert error(FA.run(call_of(q, k, v, made, scale=0.3)).out, expected) < 1e-6


@pytest.mark.parametrize("mask", [None, (T, T), (B, T, T)], ids=str)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_fa_causal(mask: tuple[int, ...] | None, kind: torch.dtype) -> None:
    q, k, v = qkv(B, H, T, D)
    made = None if mask is None else _mask(mask, kind)
    seen = made.unsqueeze(1) if made is not None and made.ndim == 3 else made
    expected = exact(q, k, v, seen, causal=True)
    assert error(FA.run(call_of(q, k, v, made, is_causal=True)).out, expected) < 1e-6


@pytest.mark.parametrize("mask", [None, (T, K), (5, T, K), (1, T, K)], ids=str)
def test_a_large_batch_is_cut_as_in_core(
    mask: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "BATCH_LIMIT", 2)
    monkeypatch.setattr(sdpa, "sm_of", lambda device: (9, 0))
    seen = []
    attend = sdpa._attend
    monkeypatch.setattr(sdpa, "_attend", lambda *args: seen.append(len(args[1])) or attend(*args))
    q, k, v = qkv(5, H, T, D, keys=K)
    made = None if mask is None else _mask(mask, torch.float32)
    expected = exact(q, k, v, made.unsqueeze(1) if made is not None and made.ndim == 3 else made)
    assert error(FA.run(call_of(q, k, v, made)).out, expected) < 1e-6
    assert seen == [2, 2, 1]


def test_fa_leaves_a_fused_buffer_as_it_is() -> None:
    fused = torch.randn(1, 20, 3 * H * D)
    before = fused.clone()
    q, k, v = fused.split(H * D, dim=-1)
    call = read_call(q, k, v, H)
    assert call.q.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    assert error(FA.run(call).out, exact(call.q, call.k, call.v)) < 1e-6
    assert torch.equal(fused, before)


def test_views_beyond_32_bits_are_made_contiguous() -> None:
    def v_of_fused(rows: int) -> torch.Tensor:
        return torch.empty((1, rows, 3, 56, 128), device="meta")[:, :, 2].transpose(1, 2)

    near, far = v_of_fused(99_864), v_of_fused(99_866)
    assert strides.extent(near) == 99_863 * 21_504 + 7_168
    assert strides.within_int32(near) is near
    assert strides.within_int32(far).is_contiguous()
    assert strides.extent(torch.empty(3, 0, 4)) == 0
    assert strides.extent(torch.empty(5).expand(1000, 5)) == 5


# --- FlashAttention packages ----------------------------------------------------------------------


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """packages(SM, module=function or source or None, ...): the FlashAttention candidates by name."""

    def install(sm: tuple[int, int] | None, **modules: Any) -> dict[str, Any]:
        for dotted in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
            name = dotted.replace(".", "_")
            module = None
            if name in modules:
                module = ModuleType(dotted)
                if modules[name] is not None:
                    module.flash_attn_func = modules[name]
            monkeypatch.setitem(sys.modules, dotted, module)
        monkeypatch.setattr(flash, "sm_of", lambda device: sm)
        flash.load.cache_clear()
        return {candidate.name: candidate for candidate in flash.FLASH_ATTENTION}

    yield install
    flash.load.cache_clear()


def _bthd(q: Any, k: Any, v: Any, scale: float | None, causal: bool) -> torch.Tensor:
    return (
        exact(*(t.transpose(1, 2) for t in (q, k, v)), scale=scale, causal=causal).to(q.dtype).transpose(1, 2)
    )


def fa2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False):
    assert dropout_p == 0
    return _bthd(q, k, v, softmax_scale, causal)


def fa3(q, k, v, softmax_scale=None, causal=False, qv=None, window_size=(-1, -1), num_splits=1):
    return _bthd(q, k, v, softmax_scale, causal), torch.zeros(q.shape[0], q.shape[2], q.shape[1])


def any_keyword(*args, **kwargs):
    return _bthd(*args, kwargs.get("softmax_scale"), kwargs.get("causal", False))


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("FlashAttention 2", "flash_attn", fa2),
        ("FlashAttention 3", "flash_attn_interface", fa3),
        ("FlashAttention 3", "flash_attn_interface", fa2),
        ("FlashAttention 4", "flash_attn_cute", fa3),
        ("FlashAttention 4", "flash_attn_cute", any_keyword),
    ],
)
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"is_causal": True}, {"enable_gqa": True}], ids=str)
def test_flash_packages(
    packages: Callable[..., Any], name: str, module: str, function: Any, options: dict[str, Any]
) -> None:
    candidate = packages((9, 0), **{module: function})[name]
    q, k, v = qkv(2, 4, 20, 16, key_heads=2 if "enable_gqa" in options else 4, dtype=BF16)
    call = call_of(q, k, v, **options)
    assert candidate.missing(CUDA) == candidate.unfit(call) == ""
    out = candidate.run(call)
    assert out.shape == q.shape
    assert error(out, exact(q, k, v, scale=options.get("scale"), causal="is_causal" in options)) < 0.01


def test_flash_packages_that_are_not_there(packages: Callable[..., Any]) -> None:
    found = packages((9, 0))
    assert [c.missing(CUDA) for c in found.values()] == [
        "the package flash_attn.cute is not installed",
        "the package flash_attn_interface is not installed",
        "the package flash_attn is not installed",
    ]


@pytest.mark.parametrize(
    ("sm", "fit"),
    [
        (None, []),
        ((7, 5), []),
        ((8, 6), ["FlashAttention 2"]),
        ((9, 0), ["FlashAttention 4", "FlashAttention 3", "FlashAttention 2"]),
        ((10, 0), ["FlashAttention 4", "FlashAttention 2"]),
    ],
)
def test_cards_of_flash_packages(
    packages: Callable[..., Any], sm: tuple[int, int] | None, fit: list[str]
) -> None:
    found = packages(sm, flash_attn=fa2, flash_attn_interface=fa3, flash_attn_cute=fa3)
    assert [name for name, candidate in found.items() if not candidate.missing(CUDA)] == fit


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('undefined symbol')", "the package flash_attn is broken (OSError: undefined symbol)"),
        ("import flash_attn_2_cuda", "the package flash_attn is broken (ModuleNotFoundError: "),
        ("raise SystemError('bad')", "the package flash_attn is broken (SystemError: bad)"),
        ("other = 1", "the package flash_attn is broken (AttributeError: "),
        ("def flash_attn_func(q, k, v): pass", "flash_attn.flash_attn_func has no softmax_scale"),
    ],
)
def test_a_broken_flash_package_is_missing(
    packages: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    candidate = packages((9, 0))["FlashAttention 2"]
    (tmp_path / "flash_attn.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn")
    assert candidate.missing(CUDA).startswith(said)


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ({"head_dim": 256}, {}, ""),
        ({"head_dim": 264}, {}, "head_dim 264"),
        ({"head_dim": 20}, {}, "head_dim 20"),
        ({"dtype": torch.float32}, {}, "dtype torch.float32"),
        ({"key_heads": 2}, {}, "grouped heads"),
        ({"key_heads": 3}, {"enable_gqa": True}, "grouped heads"),
        ({"keys": 5}, {}, ""),
        ({"keys": 5}, {"is_causal": True}, "causal"),
        ({}, {"mask": torch.zeros(9, 9)}, "mask"),
    ],
)
def test_what_flash_packages_refuse(
    packages: Callable[..., Any], shape: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    shape = {"head_dim": 64, "dtype": BF16} | shape
    call = call_of(*qkv(1, 4, 9, shape.pop("head_dim"), **shape), **options)
    assert packages((9, 0), flash_attn=fa2)["FlashAttention 2"].unfit(call) == reason


def test_a_flash_package_without_causal(packages: Callable[..., Any]) -> None:
    def function(q, k, v, softmax_scale=None):
        return _bthd(q, k, v, softmax_scale, False)

    candidate = packages((9, 0), flash_attn=function)["FlashAttention 2"]
    tensors = qkv(1, 2, 9, 64, dtype=BF16)
    assert candidate.unfit(call_of(*tensors, is_causal=True)) == "causal"
    assert error(candidate.run(call_of(*tensors)), exact(*tensors)) < 0.01


@pytest.mark.parametrize("candidate", [sdpa.CUDNN, sdpa.FLASH], ids=lambda c: c.name)
def test_gpu_kernels_are_missing_elsewhere(candidate: Any) -> None:
    assert candidate.missing(CPU) == "needs a GPU, not cpu"


# --- kitchen_int8 ---------------------------------------------------------------------------------


def _meta(rows: int, heads: int = 56, head_dim: int = 128, batch: int = 1, dtype: Any = BF16) -> torch.Tensor:
    return torch.empty((batch, heads, rows, head_dim), dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("q", "k", "reason"),
    [
        # Offsets of more rows do not fit 32 bits.
        (_meta(299_520), _meta(299_520), ""),
        (_meta(299_521), _meta(299_521), "2**31 elements or more"),
        (_meta(64), _meta(299_521), "2**31 elements or more"),
        (_meta(299_521), _meta(64), "2**31 elements or more"),
        (_meta(160_000, batch=2), _meta(160_000, batch=2), "2**31 elements or more"),
        # Heads of 72 are padded to 128.
        (_meta(299_521, head_dim=72), _meta(299_521, head_dim=72), "2**31 elements or more"),
        (_meta(299_521, head_dim=64), _meta(299_521, head_dim=64), ""),
        (_meta(99, head_dim=256), _meta(99, head_dim=256), ""),
        (_meta(99, head_dim=257), _meta(99, head_dim=257), "head_dim 257"),
        (_meta(99, dtype=torch.float64), _meta(99, dtype=torch.float64), "dtype float64"),
        (_meta(99), _meta(99, dtype=torch.float16), "dtype bfloat16"),
        (_meta(99), _meta(99, heads=8), "numbers of heads that do not divide"),
        (_meta(99).mT.contiguous().mT, _meta(99), "strided head_dim"),
    ],
    ids=range(13),
)
def test_what_kitchen_int8_refuses(q: torch.Tensor, k: torch.Tensor, reason: str) -> None:
    assert KITCHEN.unfit(call_of(q, k, k)) == reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"is_causal": True}, "causal"),
        ({"low_precision_attention": False}, "the model asks for full precision"),
        ({"mask": torch.zeros(9, 9, dtype=torch.int64)}, "mask of int64"),
        ({"mask": torch.zeros(9, 9)}, ""),
    ],
)
def test_which_calls_kitchen_int8_refuses(options: dict[str, Any], reason: str) -> None:
    assert KITCHEN.unfit(call_of(_meta(9), _meta(9), _meta(9), **options)) == reason


def test_kitchen_int8_takes_grouped_heads() -> None:
    assert KITCHEN.unfit(call_of(_meta(9), _meta(9, heads=8), _meta(9, heads=8), enable_gqa=True)) == ""


@pytest.mark.core
def test_kitchen_int8_says_what_is_missing() -> None:
    import comfy_kitchen

    assert KITCHEN.missing(CPU) == ("comfy_kitchen's int8_attention needs a GPU, not cpu")
    why = KITCHEN.missing(CUDA)
    if not hasattr(comfy_kitchen, "int8_attention"):
        assert why.endswith(f'has no int8_attention; run: "{sys.executable}" -m pip install -U comfy-kitchen')
    elif comfy_kitchen.int8_attention_is_available(CUDA):
        assert why == ""
    else:
        assert why.startswith("comfy_kitchen's int8_attention does not run on this GPU")


@pytest.mark.core
def test_a_failure_of_kitchen_int8_names_the_way_out() -> None:
    import comfy_kitchen

    if not hasattr(comfy_kitchen, "int8_attention"):
        pytest.skip("this comfy_kitchen has no int8_attention")
    assert {"scale", "attn_mask"} <= inspect.signature(comfy_kitchen.int8_attention).parameters.keys()
    with pytest.raises(KitchenSolError, match="Choose fa as dense_backend") as caught:
        KITCHEN.run(call_of(*qkv(1, 2, 9, 64)))  # on the CPU, where it does not run
    assert "(1, 2, 9, 64)" in caught.value.problem
