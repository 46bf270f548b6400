"""The adapters of the packages of the paper's kernels (NVlabs, and ports to Triton): what each passes on,
what it refuses, and why one is missing. The packages are doubles (sol_doubles.py); the real ones are in
test_gpu_sol_providers.py.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import sol_doubles
import torch
from comfyui import inprocess
from sol_data import smooth_qkv
from sol_doubles import CPU, CUDA, SCALE, meta, of_fused, options, pretend_sm

providers = inprocess.pack_module("kernels_glue.attention.providers")
reference = inprocess.pack_module("kernels_glue.attention.reference")

NVLABS, TRITON = providers.PROVIDERS["nvlabs"], providers.PROVIDERS["triton"]


# --- nvlabs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        options(),
        options(0.3, thresh_type="exact"),
        options(1.5, sink_keys=(0, 70)),
        options(1.5, sink_keys=(200, 201)),
        options(1.5, sink_keys=(400, 449)),
    ],
    ids=["plain", "exact", "first", "middle", "last"],
)
@pytest.mark.parametrize("provider", ["nvlabs", "triton official", "triton wan2gp"])
@pytest.mark.parametrize("batch", [1, 2])
def test_packages_of_the_paper(
    provider: str, asked: Any, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of a fused projection give the row-wise reference's bits, with the sinks where they belong."""
    name, function = {
        "nvlabs": ("sol_attn", sol_doubles.official),
        "triton official": ("sol_attn.triton_ref", sol_doubles.official_triton),
        "triton wan2gp": ("shared.sol_attn", sol_doubles.wan2gp),
    }[provider]
    spy = sol_doubles.install(monkeypatch, name, function)
    adapter = NVLABS if provider == "nvlabs" else TRITON
    q, k, v = of_fused(*smooth_qkv(449, head_dim=128, batch=batch, dtype=torch.bfloat16))
    assert adapter.unsupported(asked) == adapter.unfit(q, k, v) == ""
    result = adapter.run(q, k, v, asked)
    expected = reference.sol_rowwise(
        q, k, v, scale=SCALE, tau=asked.tau, thresh_type=asked.thresh_type, sink_keys=asked.sink_keys
    )
    assert torch.equal(result.out, expected.out)
    assert result.density is None and len(spy.calls) == 1
    if provider == "triton wan2gp":
        assert all(given is tensor for given, tensor in zip(spy.tensors, (q, k, v), strict=True))
    if asked.sink_keys == (0, 70):
        assert spy.keywords["sink_start"] == 0  # None, the default, would be the end


def test_nvlabs_copies_nothing_that_is_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = sol_doubles.install(monkeypatch, "sol_attn", sol_doubles.official)
    q, k, v = smooth_qkv(65, head_dim=128, dtype=torch.bfloat16)
    k_view = torch.stack([k, k], dim=2)[:, :, 0]
    NVLABS.run(q, k_view, v, options())
    assert spy.tensors[0] is q and spy.tensors[2] is v and torch.equal(spy.tensors[1], k)


def test_kv_splits_of_nvlabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On SM 9.0 with CuTe; never more splits than groups of 64 blocks, which the kernel refuses."""
    spy = sol_doubles.install(monkeypatch, "sol_attn", sol_doubles.official)
    asked = options(kv_splits=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert NVLABS.unsupported(asked) == "has kv_splits on SM 9.0 with CuTe only (4 asked)"
    pretend_sm(monkeypatch, 10, 0)
    assert NVLABS.unsupported(asked) and NVLABS.unsupported(options()) == ""
    pretend_sm(monkeypatch, 9, 0)
    assert NVLABS.unsupported(asked) == ""
    passed = {}
    for tokens in (65, 4097, 8193, 12289):
        tensors = smooth_qkv(tokens, heads=1, head_dim=128, dtype=torch.bfloat16)
        with monkeypatch.context() as patched:
            patched.setattr(sol_doubles, "_rowwise", lambda q, *_: q)
            NVLABS.run(*tensors, asked)
        passed[tokens] = spy.keywords.get("kv_splits", 1)
    assert passed == {65: 1, 4097: 2, 8193: 2, 12289: 4}
    backend = {"get_sol_attn_backend": lambda device: "triton"}
    sol_doubles.install(monkeypatch, "sol_attn", sol_doubles.official, **backend)
    assert NVLABS.unsupported(asked) == "has kv_splits on SM 9.0 with CuTe only (4 asked)"


def test_nvlabs_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs an NVIDIA GPU, not cpu" in NVLABS.missing(CPU)
    pretend_sm(monkeypatch, 7, 5)
    assert "from SM 8.0 on, not SM 7.5" in NVLABS.missing(CUDA)
    pretend_sm(monkeypatch, 8, 6)
    monkeypatch.setitem(sys.modules, "sol_attn", None)
    said = NVLABS.missing(CUDA)
    assert said.startswith("sol_attn is not installed; run: ")
    assert "git+https://github.com/NVlabs/Sana#subdirectory=techniques/sparse_backends/sol_attn" in said
    sol_doubles.install(monkeypatch, "sol_attn", sol_doubles.official)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.6.0"))
    assert NVLABS.missing(CUDA) == ""


# --- triton --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sm", "int8"),
    [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), False), ((12, 1), True), ((11, 0), False)],
)
def test_int8_scores_by_signature_and_device(
    sm: tuple[int, int], int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_sm(monkeypatch, *sm)
    q, k, v = smooth_qkv(65, head_dim=128, dtype=torch.bfloat16)
    spy = sol_doubles.install(monkeypatch, "shared.sol_attn", sol_doubles.wan2gp)
    TRITON.run(q, k, v, options())
    assert spy.keywords.get("int8_qk", False) is int8
    monkeypatch.delitem(sys.modules, "shared.sol_attn")
    spy = sol_doubles.install(monkeypatch, "sol_attn.triton_ref", sol_doubles.official_triton)
    TRITON.run(q, k, v, options())
    assert "int8_qk" not in spy.keywords


def test_first_triton_source_wins_and_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sol_doubles.install(monkeypatch, "sol_attn.triton_ref", sol_doubles.official_triton)
    wan = sol_doubles.install(monkeypatch, "shared.sol_attn", sol_doubles.wan2gp)
    own = sol_doubles.install(monkeypatch, "sol_attn_triton", sol_doubles.wan2gp)
    q, k, v = smooth_qkv(65, head_dim=128, dtype=torch.bfloat16)
    TRITON.run(q, k, v, options())
    assert len(own.calls) == 1 and not wan.calls
    monkeypatch.delitem(sys.modules, "sol_attn_triton")
    TRITON.run(q, k, v, options())
    assert len(wan.calls) == 1
    assert TRITON.unsupported(options(kv_splits=2, token_aug=64)) == (
        "has no kv_splits (2 asked), token_aug (64 asked)"
    )


@pytest.mark.parametrize(
    ("triton", "said"),
    [
        (None, "Triton is not installed; run: "),
        ("3.5.1", "Triton 3.5.1 is too old for the Sol kernels, which need 3.6; run: "),
        ("2.9", "Triton 2.9 is too old"),
        ("3.10.0+git1", ""),
    ],
)
def test_triton_itself(triton: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_sm(monkeypatch, 9, 0)
    module = None if triton is None else types.SimpleNamespace(__version__=triton)
    monkeypatch.setitem(sys.modules, "triton", module)
    for name in ("sol_attn", "shared.sol_attn"):
        sol_doubles.install(monkeypatch, name, sol_doubles.wan2gp)
    for provider in (TRITON, NVLABS):
        problem = provider.missing(CUDA)
        assert problem.startswith(said) if said else problem == ""


def test_no_triton_source(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_sm(monkeypatch, 9, 0)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.6.0"))
    for name in ("sol_attn_triton", "shared.sol_attn", "sol_attn.triton_ref"):
        monkeypatch.setitem(sys.modules, name, None)
    said = TRITON.missing(CUDA)
    assert said.startswith("no Triton version of sol_attn is installed (sol_attn_triton, shared.sol_attn, ")


def test_triton_stays_within_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port's INT8 path crashes beyond 2**31 elements in a call: samples go apart, or not at all."""
    fits, over = meta(1, 299520, 56, 128), meta(1, 299700, 56, 128)
    assert TRITON.unfit(fits, fits, fits) == ""
    assert TRITON.unfit(over, over, over) == "299700 tokens of 56 x 128, past its 32-bit offsets"
    spy = sol_doubles.install(monkeypatch, "shared.sol_attn", sol_doubles.wan2gp)
    with monkeypatch.context() as patched:
        patched.setattr(sol_doubles, "_rowwise", lambda q, *_: q)
        for tokens, shapes in ((149760, [2]), (160000, [1, 1])):
            spy.calls.clear()
            batch = meta(2, tokens, 56, 128)
            assert TRITON.unfit(batch, batch, batch) == ""
            assert TRITON.run(batch, batch, batch, options()).out.shape == batch.shape
            assert [tensors[0].shape[0] for tensors, _ in spy.calls] == shapes


def test_triton_sample_by_sample_equals_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sol_doubles.install(monkeypatch, "shared.sol_attn", sol_doubles.wan2gp)
    q, k, v = of_fused(*smooth_qkv(449, head_dim=128, batch=2, dtype=torch.bfloat16))
    whole = TRITON.run(q, k, v, options(sink_keys=(0, 70))).out
    module = sys.modules[type(TRITON).__module__]
    monkeypatch.setattr(module, "past_32_bits", lambda *_: "past")
    assert torch.equal(TRITON.run(q, k, v, options(sink_keys=(0, 70))).out, whole)
