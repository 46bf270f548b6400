"""The backend `sage_attn`: values, and the traps of sageattention, which is doubled here (no GPU)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import sage_doubles
import torch
from comfyui import inprocess
from dense_checks import call_of, error, exact, qkv

sage = inprocess.pack_module("kernels_glue.attention.dense.sage")
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
# bf16 rounding of inputs that are compared before it, and of the output.
ROUNDING = 0.02


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """use(package, sm): the backend with that package on a card of that SM."""

    def install(package: ModuleType | None, sm: tuple[int, int] | None = (8, 6)) -> Any:
        monkeypatch.setitem(sys.modules, "sageattention", package)
        monkeypatch.setattr(sage, "sm_of", lambda device: sm)
        sage.load.cache_clear()
        return sage.SageBackend()

    yield install
    sage.load.cache_clear()


PACKAGES = {
    "1.0.6": (sage_doubles.version_1, (8, 6)),
    "1.0.6 on Hopper": (sage_doubles.version_1, (9, 0)),
    "2.x on SM 8.6": (lambda: sage_doubles.version_2((8, 6)), (8, 6)),
    "2.x on SM 8.9": (lambda: sage_doubles.version_2((8, 9)), (8, 9)),
    "2.x on Hopper": (lambda: sage_doubles.version_2((9, 0)), (9, 0)),
    "2.2 on Hopper": (lambda: sage_doubles.version_2((9, 0), pads=True), (9, 0)),
}


@pytest.fixture(params=PACKAGES)
def backend(request: pytest.FixtureRequest, use: Callable[..., Any]) -> Any:
    package, sm = PACKAGES[request.param]
    return use(package(), sm)


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [1, 128, 129, 192, 193, 255])
def test_values_at_every_kind_of_key_length(backend: Any, keys: int) -> None:
    q, k, v = qkv(2, 2, 20, 64, keys=keys, dtype=BF16)
    call = call_of(q, k, v)
    assert backend.missing(CUDA) == ""
    if sage.load().generation == 1 and keys in (1, 129, 193):
        assert backend.unfit(call) == f"{keys} keys, few and no multiple of 64"
        return
    assert backend.unfit(call) == ""
    result = backend.run(call)
    assert result.out.shape == q.shape
    assert result.out.dtype == BF16
    assert error(result.out, exact(q, k, v)) < ROUNDING


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"is_causal": True}])
def test_scale_and_causal(backend: Any, options: dict[str, Any]) -> None:
    q, k, v = qkv(1, 2, 128, 64, dtype=BF16)
    expected = exact(q, k, v, scale=options.get("scale"), causal="is_causal" in options)
    assert error(backend.run(call_of(q, k, v, **options)).out, expected) < ROUNDING


def test_strided_views_of_fused_qkv(backend: Any) -> None:
    fused = torch.cat([t.transpose(1, 2).flatten(2) for t in qkv(1, 2, 192, 64, dtype=BF16)], dim=-1)
    q, k, v = (t.unflatten(-1, (2, 64)).transpose(1, 2) for t in fused.split(128, dim=-1))
    before = fused.clone()
    assert error(backend.run(call_of(q, k, v)).out, exact(q, k, v)) < ROUNDING
    assert torch.equal(fused, before)


def test_a_strided_head_dim_is_made_contiguous(backend: Any) -> None:
    q, k, v = (t.mT.contiguous().mT for t in qkv(1, 1, 64, 64, dtype=BF16))
    assert q.stride(3) != 1
    assert error(backend.run(call_of(q, k, v)).out, exact(q, k, v)) < ROUNDING


# --- the traps ----------------------------------------------------------------------------------


def test_the_callers_tensors_are_left_alone(backend: Any) -> None:
    tensors = qkv(1, 2, 100, 64, dtype=BF16)
    before = [t.clone() for t in tensors]
    backend.run(call_of(*tensors))
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


def test_version_1_gets_smoothed_keys(use: Callable[..., Any]) -> None:
    package = sage_doubles.version_1()
    q, k, v = qkv(1, 2, 100, 64, dtype=BF16)
    assert k.float().mean(dim=2).abs().max() > 0.5
    use(package).run(call_of(q, k, v))
    assert package.smoothed == [True]


def test_version_2_gets_the_callers_own_keys(use: Callable[..., Any]) -> None:
    package, seen = sage_doubles.version_2((8, 9)), []
    inner = package.sageattn

    def sageattn(q: Any, k: Any, v: Any, tensor_layout: str = "HND", **others: Any) -> Any:
        seen.append((k.data_ptr(), others))
        return inner(q, k, v, tensor_layout, **others)

    package.sageattn = sageattn
    q, k, v = qkv(1, 2, 100, 64, dtype=BF16)
    use(package, (8, 9)).run(call_of(q, k, v))
    # It smooths by itself unless it is told not to.
    assert seen == [(k.data_ptr(), {"is_causal": False, "sm_scale": None})]


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float16, 2_000.0), (torch.float16, 65_000.0), (BF16, 2_000.0), (BF16, 1e6)]
)
def test_large_values_do_not_overflow_fp16(backend: Any, dtype: torch.dtype, largest: float) -> None:
    q, k, v = qkv(1, 3, 128, 64)
    q, k, v = (0.01 * q).to(dtype), k.to(dtype), v.to(dtype)
    v[:, 1] = largest  # equal weights and values: the worst case of a block's sum
    out = backend.run(call_of(q, k, v)).out
    for head in range(3):
        expected = exact(q[:, head : head + 1], k[:, head : head + 1], v[:, head : head + 1])
        assert error(out[:, head : head + 1], expected) < ROUNDING, head


def test_values_that_fit_are_not_rounded_by_the_scaling(use: Callable[..., Any]) -> None:
    q, k, v = qkv(1, 2, 100, 64, dtype=BF16)
    package = sage_doubles.version_1()
    smooth = k - k.mean(dim=2, keepdim=True)
    assert torch.equal(use(package).run(call_of(q, k, v)).out, package.sageattn(q, smooth, v, smooth_k=False))


def test_the_scaling_rounds_nothing() -> None:
    v = qkv(1, 3, 100, 64, dtype=BF16)[2] * torch.tensor([1.0, 1e3, 1e6]).reshape(1, 3, 1, 1).to(BF16)
    scaled, factor = sage._scaled(v)
    assert torch.equal(scaled * factor, v)
    assert 64 * scaled.abs().max() <= 65_504
    assert factor.flatten()[0] == 1 < factor.flatten()[1]


def test_the_scaling_does_not_wait_for_the_device(backend: Any) -> None:
    v = torch.empty((1, 2, 100, 64), dtype=BF16, device="meta")
    scaled, factor = sage._scaled(v)  # a value that is read would raise on meta tensors
    assert scaled.shape == v.shape
    assert factor.shape == (1, 2, 1, 1)


# --- what it does not take ----------------------------------------------------------------------


def _unfit(use: Callable[..., Any], sm: tuple[int, int], *args: Any, **options: Any) -> str:
    return use(sage_doubles.version_1(), sm).unfit(call_of(*args, **options))


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ({"head_dim": 160}, {}, "head_dim 160"),
        ({"head_dim": 64}, {}, ""),
        ({"head_dim": 96}, {}, ""),
        ({"head_dim": 128}, {}, ""),
        ({"dtype": torch.float32}, {}, "dtype float32"),
        ({"dtype": torch.float16}, {}, ""),
        ({"key_heads": 1}, {"enable_gqa": True}, "grouped heads"),
        ({"keys": 128}, {}, ""),
        ({"keys": 128}, {"is_causal": True}, "causal with q and k of different lengths"),
        ({}, {"low_precision_attention": False}, "the model asks for full precision"),
        ({}, {"mask": torch.zeros(64, 64)}, "mask"),
    ],
)
def test_what_it_refuses(
    use: Callable[..., Any], shape: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    shape = {"head_dim": 64, "dtype": BF16} | shape
    assert _unfit(use, (8, 6), *qkv(1, 2, 64, shape.pop("head_dim"), **shape), **options) == reason


@pytest.mark.parametrize(
    ("sm", "rows", "heads", "reason"),
    [
        ((12, 0), 160_000, 1, ""),
        ((12, 0), 160_001, 1, "over 160000 tokens on SM 12.0"),
        ((9, 0), 299_594, 56, "2**31 elements or more"),
        ((9, 0), 299_593, 56, ""),
    ],
)
def test_how_long_it_may_be(
    use: Callable[..., Any], sm: tuple[int, int], rows: int, heads: int, reason: str
) -> None:
    q, k, v = (torch.empty((1, heads, rows, 128), dtype=BF16, device="meta") for _ in range(3))
    assert _unfit(use, sm, q, k, v) == reason


@pytest.mark.parametrize(
    ("keys", "fits"),
    [(64, True), (65, False), (127, True), (6_208, True), (6_209, False), (6_273, False), (6_337, True)],
)
def test_version_1_counts_missing_keys(use: Callable[..., Any], keys: int, fits: bool) -> None:
    q, k, v = (torch.empty((1, 2, keys, 128), dtype=BF16, device="meta") for _ in range(3))
    assert (_unfit(use, (9, 0), q, k, v) == "") == fits
    assert _unfit(use, (9, 0), q, k, v, is_causal=True) == ""
    assert use(sage_doubles.version_2((9, 0)), (9, 0)).unfit(call_of(q, k, v)) == ""


@pytest.mark.parametrize(
    ("sm", "works"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((10, 0), False), ((12, 0), True)]
)
def test_cards_of_version_2(use: Callable[..., Any], sm: tuple[int, int], works: bool) -> None:
    why = use(sage_doubles.version_2(sm), sm).missing(CUDA)
    assert why == ("" if works else f"sageattention 2 has no kernel for SM {sm[0]}.{sm[1]}")


def test_version_1_is_not_missing_where_only_version_2_is(use: Callable[..., Any]) -> None:
    assert use(sage_doubles.version_1(), (10, 0)).missing(CUDA) == ""


def test_missing_names_the_command_that_installs_it(use: Callable[..., Any]) -> None:
    why = use(None).missing(CUDA)
    assert why == f'sageattention is not installed; run: "{sys.executable}" -m pip install sageattention'


def test_missing_on_cpu_needs_no_package(use: Callable[..., Any]) -> None:
    why = use(None).missing(torch.device("cpu"))
    assert why == "sageattention needs a CUDA GPU, not cpu"


@pytest.mark.parametrize(
    ("raises", "said"),
    [
        (
            "raise OSError('libcudart.so.12 not found')",
            "sageattention is broken (OSError: libcudart.so.12 not found)",
        ),
        ("import triton_of_nobody.language", "sageattention needs triton_of_nobody, which is not installed"),
        ("value = 1", "sageattention is broken (AttributeError: "),
    ],
    ids=["library", "dependency", "no function"],
)
def test_a_broken_package_is_missing(
    use: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, raises: str, said: str
) -> None:
    (tmp_path / "sageattention.py").write_text(raises)
    monkeypatch.syspath_prepend(str(tmp_path))
    backend = use(None)
    monkeypatch.delitem(sys.modules, "sageattention")
    why = backend.missing(CUDA)
    assert why.startswith(said)
    assert f'run: "{sys.executable}" -m pip install' in why


def test_a_failure_in_a_call_names_the_way_out(use: Callable[..., Any]) -> None:
    # As on a card that `missing` does not know.
    backend = use(sage_doubles.version_2((10, 0)), (13, 0))
    with pytest.raises(KitchenSolError) as caught:
        backend.run(call_of(*qkv(1, 2, 9, 64, dtype=BF16)))
    assert caught.value.node == "Sol Attention Patch"
    assert "Unsupported CUDA architecture: sm100" in caught.value.problem
    assert "(1, 2, 9, 64)" in caught.value.problem
    assert caught.value.remedy.startswith("Choose fa as dense_backend")


def test_out_of_memory_is_not_the_packages_fault(use: Callable[..., Any]) -> None:
    package = sage_doubles.version_1()

    def sageattn(q: Any, k: Any, v: Any, smooth_k: bool = True, **others: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("full")

    package.sageattn = sageattn
    with pytest.raises(torch.cuda.OutOfMemoryError):
        use(package).run(call_of(*qkv(1, 2, 9, 64, dtype=BF16)))
