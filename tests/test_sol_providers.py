"""The Sol providers: what each passes to its kernel, what it refuses, and why one is missing.

comfy_kitchen's eager version runs on a CPU; packages that no registry has are doubles (sol_doubles.py).
"""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import comfy_kitchen
import pytest
import sol_doubles
import torch
from comfyui import inprocess
from sol_data import difference, smooth_qkv
from sol_doubles import CPU, CUDA, SCALE, far, meta, of_fused, options, pretend_sm
from triton_interpreter import compute_in_bf16

providers = inprocess.pack_module("kernels_glue.attention.providers")
devices = inprocess.pack_module("kernels_glue.attention.providers.devices")
signature = inprocess.pack_module("kernels_glue.attention.providers.signature")
packages = inprocess.pack_module("kernels_glue.attention.providers.packages")
reference = inprocess.pack_module("kernels_glue.attention.reference")
sol = inprocess.pack_module("kernels_glue.attention.sol")
sol_triton = inprocess.pack_module("kernels_glue.attention.sol_triton")
tiles = inprocess.pack_module("kernels_glue.attention.sol_tiles")
builtin = inprocess.pack_module("kernels_glue.attention.providers.builtin")
fastest = inprocess.pack_module("kernels_glue.attention.providers.fastest")
config = inprocess.pack_module("kernels_glue.attention.config")

KITCHEN, NVLABS, TRITON, REFERENCE, BUILTIN = (
    providers.PROVIDERS[name] for name in ("kitchen", "nvlabs", "triton", "reference", "builtin")
)
needs_sol = pytest.mark.skipif(
    not hasattr(comfy_kitchen, "sol_attn"), reason="this comfy-kitchen has no sol_attn"
)


# --- the table and its rules ---------------------------------------------------------------------


def test_table_has_the_options_of_the_node() -> None:
    assert set(providers.PROVIDERS) == set(config.PROVIDER_OPTIONS) - {"auto"}
    assert all(provider.name == name for name, provider in providers.PROVIDERS.items())
    facts = {name: (p.min_tokens, p.exact_queries) for name, p in providers.PROVIDERS.items()}
    assert facts == {
        "kitchen": (12288, True),
        "nvlabs": (8192, False),
        "triton": (8192, False),
        "reference": (0, True),
        "builtin": (8192, True),
    }


@pytest.mark.parametrize(
    ("sm", "first"),
    [
        ((9, 0), "builtin"),
        ((10, 0), "builtin"),
        ((8, 9), "kitchen"),
        ((12, 0), "kitchen"),
        ((8, 6), "kitchen"),
    ],
)
def test_auto_looks_at_all_kernels(sm: tuple[int, int], first: str) -> None:
    """The first is for calls that cannot be timed: docs/measured.md for SM 9.0, public tables elsewhere."""
    order = providers.auto_order(sm)
    assert order[0] == first and sorted(order) == ["builtin", "kitchen", "nvlabs", "triton"]


def test_auto_without_an_nvidia_gpu_finds_no_kernel_on_a_cpu() -> None:
    assert providers.auto_order(None) == ("kitchen",)
    assert KITCHEN.missing(CPU)


@pytest.mark.parametrize(
    ("choice", "sm", "tokens", "splits"),
    [
        ("auto", (9, 0), 65536, 4),
        ("auto", (9, 0), 65535, 1),
        ("auto", (10, 0), 90000, 1),
        ("auto", None, 90000, 1),
        ("2", (8, 0), 100, 2),
        ("1", (9, 0), 90000, 1),
    ],
)
def test_kv_splits(choice: str, sm: tuple[int, int] | None, tokens: int, splits: int) -> None:
    assert providers.kv_splits_for(choice, sm, tokens) == splits


# --- reference -----------------------------------------------------------------------------------


def test_reference_passes_everything_on() -> None:
    q, k, v = smooth_qkv(449, head_dim=128, dtype=torch.float64)
    asked = options(0.5, thresh_type="exact", sink_keys=(70, 80), sink_queries=(200, 210))
    assert REFERENCE.missing(CPU) == REFERENCE.unsupported(asked) == REFERENCE.unfit(q, k, v) == ""
    expected = reference.sol_rowwise(
        q,
        k,
        v,
        scale=SCALE,
        tau=0.5,
        thresh_type="exact",
        sink_keys=(70, 80),
        sink_queries=(200, 210),
        compute_dtype=torch.float64,
    )
    result = REFERENCE.run(q, k, v, asked)
    assert torch.equal(result.out, expected.out) and float(result.density) == float(expected.density)


# --- kitchen -------------------------------------------------------------------------------------


@needs_sol
@pytest.mark.core
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize(
    ("tokens", "batch"),
    [(t, b) for t in (64, 65, 127, 192, 255, 1031) for b in (1, 2)] + [(4097, 1)],
)
def test_kitchen_equals_the_centroid_reference(tokens: int, batch: int, sinks: bool) -> None:
    q, k, v = smooth_qkv(tokens, heads=1 if tokens > 2000 else 2, head_dim=128, batch=batch, seed=tokens)
    rows = {"sink_keys": (10, tokens // 3), "sink_queries": (tokens // 2, tokens)} if sinks else {}
    asked = options(0.7, **rows)
    assert KITCHEN.unsupported(asked) == ""
    result = KITCHEN.run(*of_fused(q, k, v), asked)
    expected = reference.sol_centroid(q, k, v, scale=SCALE, tau=0.7, **rows, compute_dtype=torch.float64)
    assert difference(result.out, expected.out) < 1e-5
    assert result.density is None
    if tokens > 1000:
        assert (
            difference(reference.sol_rowwise(q, k, v, scale=SCALE, tau=0.7, **rows).out, expected.out) > 0.01
        )


@needs_sol
@pytest.mark.core
def test_kitchen_refuses_what_its_signature_lacks() -> None:
    assert KITCHEN.unsupported(options(token_aug=128)) == ""  # from 0.2.33 on
    assert KITCHEN.unsupported(options(thresh_type="exact")) == "has no thresh_type (exact asked)"
    assert KITCHEN.unsupported(options(kv_splits=4)) == "has no kv_splits (4 asked)"


@pytest.fixture
def kitchen_spy(monkeypatch: pytest.MonkeyPatch) -> sol_doubles.Spy:
    """comfy_kitchen 0.2.32: a sol_attn without token_aug, on a device that it takes."""

    def sol_attn(
        q: Any,
        k: Any,
        v: Any,
        tau: float = 1.0,
        scale: Any = None,
        sink_blocks: Any = None,
        sink_q: Any = None,
    ) -> Any:
        return torch.zeros_like(q)

    available = {"sol_attn_is_available": lambda device: device.type == "cuda"}
    return sol_doubles.install(monkeypatch, "comfy_kitchen", sol_attn, **available)


def test_kitchen_of_an_older_signature(kitchen_spy: sol_doubles.Spy) -> None:
    q, k, v = smooth_qkv(130, head_dim=128, dtype=torch.bfloat16)
    assert KITCHEN.missing(CUDA) == ""
    assert KITCHEN.unsupported(options(token_aug=64)) == "has no token_aug (64 asked)"
    KITCHEN.run(q, k, v, options(0.5, sink_keys=(63, 65), sink_queries=(64, 128)))
    assert kitchen_spy.keywords == {"tau": 0.5, "scale": SCALE, "sink_blocks": [0, 2], "sink_q": [1, 2]}


def test_kitchen_copies_only_what_breaks_its_rules(kitchen_spy: sol_doubles.Spy) -> None:
    """Views go in as they are; a crooked base pointer, a crooked row stride and a strided row do not."""
    q, k, v = of_fused(*smooth_qkv(65, head_dim=128, dtype=torch.bfloat16))
    KITCHEN.run(q, k, v, options())
    assert all(given is tensor for given, tensor in zip(kitchen_spy.tensors, (q, k, v), strict=True))

    offset = torch.zeros(65 * 256 + 1, dtype=torch.bfloat16)[1:].view(1, 65, 2, 128)
    rows = torch.zeros(1, 65, 2, 132, dtype=torch.bfloat16)[..., :128]
    strided = torch.zeros(1, 65, 2, 256, dtype=torch.bfloat16)[..., ::2]
    assert offset.is_contiguous()
    for crooked in (offset, rows, strided):
        crooked.copy_(k)
        KITCHEN.run(q, crooked, v, options())
        given = kitchen_spy.tensors
        assert given[0] is q and given[2] is v
        assert torch.equal(given[1], k) and given[1].is_contiguous() and given[1].data_ptr() % 16 == 0


def test_kitchen_takes_what_is_too_long_for_its_int8_attention() -> None:
    """int8_attention ends at 299,520 rows of this size and falls back; the Sol kernel goes on."""
    long = meta(1, 299521, 56, 128)
    assert KITCHEN.unfit(long, long, long) == ""


def test_kitchen_without_sol_attn_or_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (KITCHEN.missing(CPU) == "") is False
    old = types.ModuleType("comfy_kitchen")
    monkeypatch.setitem(sys.modules, "comfy_kitchen", old)
    monkeypatch.setattr(packages.importlib.metadata, "version", lambda name: "0.2.26")
    said = KITCHEN.missing(CUDA)
    assert said.startswith("comfy-kitchen 0.2.26 has no sol_attn; run: ")
    assert '-m pip install -U "comfy-kitchen>=0.2.32"' in said and sys.executable in said
    sol_doubles.install(monkeypatch, "comfy_kitchen", len, sol_attn_is_available=lambda device: False)
    assert "cannot run on a CPU" in KITCHEN.missing(CPU)
    assert "cannot run on cuda:0" in KITCHEN.missing(CUDA)


# --- builtin -------------------------------------------------------------------------------------


def test_builtin_takes_bf16_and_fp16_of_head_dim_64_and_128() -> None:
    for head_dim in (64, 128):
        for dtype in (torch.bfloat16, torch.float16):
            good = meta(2, 128, 2, head_dim, dtype=dtype)
            assert BUILTIN.unfit(good, good, good) == ""
    other, full = meta(2, 128, 2, 96), meta(2, 128, 2, 128, dtype=torch.float32)
    assert BUILTIN.unfit(other, other, other) == "head_dim 96, not 64 or 128"
    assert BUILTIN.unfit(full, full, full) == "float32, not bfloat16 or float16"
    # Its offsets have 64 bits.
    long = meta(1, 700_000, 56, 128)
    assert BUILTIN.unfit(long, long, long) == ""


def test_builtin_says_which_options_it_lacks() -> None:
    assert BUILTIN.unsupported(options(0.3, thresh_type="exact", sink_keys=(0, 9), sink_queries=(0, 9))) == ""
    assert BUILTIN.unsupported(options(kv_splits=4, token_aug=64)) == (
        "has no kv_splits (4 asked), token_aug (64 asked)"
    )
    for scale in (-0.1, float("inf")):
        said = f"needs a finite scale above 0 ({scale} asked)"
        assert BUILTIN.unsupported(sol.SolOptions(1.0, scale)) == said


def test_builtin_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BUILTIN.missing(CPU) == "needs an NVIDIA GPU, not cpu"
    pretend_sm(monkeypatch, 7, 5)
    assert BUILTIN.missing(CUDA) == "needs an NVIDIA GPU from SM 8.0 on, not SM 7.5"
    pretend_sm(monkeypatch, 8, 6)
    for version, said in ((None, "Triton is not installed"), ("3.3.1", "Triton 3.3.1 is too old")):
        module = None if version is None else types.SimpleNamespace(__version__=version)
        monkeypatch.setitem(sys.modules, "triton", module)
        problem = BUILTIN.missing(CUDA)
        assert problem.startswith(said) and ">=3.4" in problem
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.4.0"))
    assert BUILTIN.missing(CUDA) == ""


@pytest.mark.parametrize("strided", [False, True], ids=["views", "strided last dimension"])
def test_builtin_passes_everything_on(monkeypatch: pytest.MonkeyPatch, strided: bool) -> None:
    """In Triton's interpreter, with a choice of tile that needs no clock."""
    pytest.importorskip("triton")
    compute_in_bf16(monkeypatch)
    tile = tiles.Tile(16, 1, 1, 1)
    asked: list[Any] = []
    chooser = types.SimpleNamespace(choose=lambda *about: asked.append(about) or tile)
    provider = type(BUILTIN)(chooser)
    q, k, v = of_fused(*smooth_qkv(200, head_dim=64, dtype=torch.bfloat16))
    if strided:
        k = torch.stack([k, k], dim=-1).flatten(-2)[..., ::2]
    how = options(0.5, thresh_type="exact", sink_keys=(0, 1), sink_queries=(130, 140))
    result = provider.run(q, k, v, how)
    expected = reference.sol_rowwise(
        q, k, v, scale=SCALE, tau=0.5, thresh_type="exact", sink_keys=(0, 1), sink_queries=(130, 140)
    )
    assert difference(result.out, expected.out) < 5e-3
    assert float(result.density) == pytest.approx(float(expected.density))
    assert asked[0][0] is q and asked[0][2] is v and "triton" in asked[0][4]
    assert asked[0][4].endswith(f"kernels {sol_triton.revision()}")


def test_builtin_copies_rows_that_are_too_far_apart() -> None:
    near = meta(2, 65, 2, 128)
    assert builtin._near(near) is near and builtin._near(far(near)).is_contiguous()


def test_kernels_that_change_are_timed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a timing has the revision in it."""
    known = sol_triton.revision()
    for name in ("sol_kernels.py", "sol_means.py", "sol_triton.py"):
        shutil.copy(Path(sol_triton.__file__).with_name(name), tmp_path)
    monkeypatch.setattr(sol_triton, "__file__", str(tmp_path / "sol_triton.py"))
    assert sol_triton.revision.__wrapped__() == known
    for name in ("sol_kernels.py", "sol_means.py", "sol_triton.py"):
        with (tmp_path / name).open("a") as file:
            file.write("# changed\n")
        assert sol_triton.revision.__wrapped__() != known
        known = sol_triton.revision.__wrapped__()
    assert f"builtin {sol_triton.revision()}" in fastest._versions()


# --- all of them ---------------------------------------------------------------------------------


def test_broken_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that fails never leaves `missing`, whatever it raises."""
    pretend_sm(monkeypatch, 9, 0)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.6.0"))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("shared.sol_attn", "sol_attn.triton_ref"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "sol_attn.py").write_text("import a_package_that_is_not_here\n")
    (tmp_path / "sol_attn_triton.py").write_text("raise AttributeError('autotune has no cache_results')\n")
    for name in ("sol_attn", "sol_attn_triton"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        packages._absent.discard(name)
    assert NVLABS.missing(CUDA).startswith(
        "sol_attn is installed, but needs the package a_package_that_is_not_here, which is not; run: "
    )
    assert TRITON.missing(CUDA).startswith(
        "sol_attn_triton is installed, but broken (AttributeError: autotune has no cache_results)"
    )
    (tmp_path / "comfy_kitchen.py").write_text("raise OSError('libcudart.so.13: cannot open')\n")
    monkeypatch.delitem(sys.modules, "comfy_kitchen")
    assert "libcudart.so.13: cannot open" in KITCHEN.missing(CUDA)


def test_an_absent_package_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a_sol_package_of_nobody"
    looked: list[str] = []
    real = packages.importlib.util.find_spec
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda n: looked.append(n) or real(n))
    assert packages.load(f"{name}.sub") == packages.load(f"{name}.sub") == (None, "")
    assert looked == [name]
    monkeypatch.setitem(sys.modules, f"{name}.sub", module := types.ModuleType(name))
    assert packages.load(f"{name}.sub") == (module, "")


def test_a_package_of_somebody_else_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wan2GP's `shared` is looked for; other projects have a package of that name."""
    package = tmp_path / "somebody_elses"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it was run')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert packages.load("somebody_elses.sol_attn") == (None, "")
    (package / "sol_attn.py").touch()
    packages._absent.discard("somebody_elses.sol_attn")
    found, problem = packages.load("somebody_elses.sol_attn")
    assert found is None and "SystemExit: it was run" in problem


@pytest.mark.parametrize("name", ["kitchen", "nvlabs", "triton"])
def test_tensors_that_no_kernel_takes(name: str) -> None:
    provider = providers.PROVIDERS[name]
    good = meta(2, 128, 2, 128)
    assert provider.unfit(good, good, good) == ""
    small, full = meta(1, 128, 2, 64), meta(2, 128, 2, 128, dtype=torch.float32)
    assert provider.unfit(small, small, small) == "head_dim 64, not 128"
    assert provider.unfit(full, full, full).startswith("float32, not bfloat16")
    assert provider.unfit(good, small, small) == "q, k and v of different shapes"
    assert provider.unfit(good, full, good) == "q, k and v of different dtypes"
    half = meta(2, 128, 2, 128, dtype=torch.float16)
    assert (provider.unfit(half, half, half) == "") is (name == "kitchen")


def test_an_option_is_passed_unless_the_signature_has_it_as_default() -> None:
    def kernel(q: Any, *, tau: float = 1.0, sink_start: Any = None, kv_splits: int = 2) -> None: ...

    wanted = [
        signature.Argument("tau", 1.0),
        signature.Argument("sink_start", 0),
        signature.Argument("kv_splits", 1, 1),
        signature.Argument("token_aug", 0, 0),
    ]
    assert signature.accepted(kernel, wanted) == {"sink_start": 0, "kv_splits": 1}
    assert signature.refusal(kernel, wanted) == ""
    wanted.append(signature.Argument("sink_q", [0, 1], [0, 0], "query sinks"))
    assert signature.refusal(kernel, wanted) == "has no query sinks ([0, 1] asked)"
