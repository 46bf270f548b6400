"""The text of the node: every kept layer can be read back from it, and LoRA that miss are named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
from comfyui import inprocess
from comfyui.builders import TinyModel

report = inprocess.pack_module("kernels_glue.quantization.report")
names_glue = inprocess.pack_module("kernels_glue.names")
plan = inprocess.pack_module("kernels_glue.quantization.plan")
PatchCount = inprocess.pack_module("kernels_glue.quantization.patch_count").PatchCount
count_patches = inprocess.pack_module("kernels_glue.quantization.patch_count").count_patches
QuantizeConfig = inprocess.pack_module("kernels_glue.quantization.config").QuantizeConfig

MakeTiny = Callable[..., TinyModel]


def marked(lines: Iterable[Any]) -> list[str]:
    """The lines as they are read."""
    return [line.marked for line in lines]


def expand(entry: str) -> Iterable[str]:
    """The names behind one entry of the report: `blocks.[0-2,5].a` stands for four."""
    match = re.fullmatch(r"(.*)\[([\d,-]+)\](.*)", entry)
    if match is None:
        return [entry]
    numbers = []
    for span in match[2].split(","):
        first, _, last = span.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return [f"{match[1]}{number}{match[3]}" for number in numbers]


def listed(text: str) -> dict[str, list[str]]:
    """{reason: names} of the report's list of kept layers; checks the count on each line."""
    found = {}
    for reason, count, names in re.findall(r"^- (.+) \((\d+)\): (.+)$", text, re.MULTILINE):
        # A comma inside brackets belongs to a range.
        found[reason] = [name for entry in re.split(r", (?![^\[]*\])", names) for name in expand(entry)]
        assert len(found[reason]) == int(count)
    return found


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["img_in"],
        ["blocks.0.a"],
        [f"blocks.{i}.mlp.fc{k}" for i in range(50) for k in (1, 2)],
        [f"blocks.{i}.a" for i in (0, 1, 2, 5, 7, 8, 49)],
        ["a.0.b.0.c", "a.0.b.1.c", "a.1.b.0.c", "a.1.b.1.c"],
        ["head.1", "head.0", "blocks.1.ffn.0", "blocks.1.ffn.2", "blocks.0.ffn.0", "blocks.0.ffn.2"],
        ["transformer_1d_blocks.0.attn1.to_q", "transformer_1d_blocks.1.attn1.to_q", "t5.yproj"],
    ],
)
def test_compressed_names_expand_to_the_same_names(names: list[str]) -> None:
    expanded = [name for entry in names_glue.compress(names) for name in expand(entry)]
    assert sorted(expanded) == sorted(names)


def test_compress_is_short() -> None:
    assert names_glue.compress(f"blocks.{i}.mlp.fc1" for i in range(50)) == ["blocks.[0-49].mlp.fc1"]
    assert names_glue.compress(f"b.{i}.a" for i in (0, 1, 2, 5)) == ["b.[0-2,5].a"]
    assert names_glue.compress(["b.3.a"]) == ["b.3.a"]
    # The number of a block only: what follows it names another layer.
    assert names_glue.compress(["b.0.ffn.0", "b.0.ffn.2"]) == ["b.0.ffn.0", "b.0.ffn.2"]


def test_kept_lines_list_each_layer_under_its_reason() -> None:
    layers = [plan.LayerInfo(f"blocks.{i}.{part}", 8, 8, True) for i in (0, 1, 2) for part in ("a", "b")]
    kept = [
        plan.Decision(layer, reason="one" if layer.name.endswith("a") else "another (of, course)")
        for layer in layers
    ]
    lines = marked(report.kept_lines(kept))
    assert lines[0] == "kept in their precision: 6"
    assert listed("\n".join(lines)) == {
        "one": [f"blocks.{i}.a" for i in range(3)],
        "another (of, course)": [f"blocks.{i}.b" for i in range(3)],
    }
    assert list(report.kept_lines([])) == []


@pytest.mark.core
@pytest.mark.parametrize("family", ["wan", "h3", "flux"])
def test_the_node_lists_every_linear_layer_it_kept(comfy: ModuleType, tiny: MakeTiny, family: str) -> None:
    import torch

    source = comfy.load_unet(tiny(family).path)
    before = {
        name: module
        for name, module in source.model.diffusion_model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    quantized, text = quantize(comfy, source, ignored_layers="re:\\.0\\.")
    int8 = {
        name.removesuffix(".weight_scale")
        for name in quantized.model.diffusion_model.state_dict()
        if name.endswith(".weight_scale")
    }
    assert int8 and f"quantized {len(int8)} of {len(before)} layers" in text
    kept = listed(text)
    assert sorted(name for names in kept.values() for name in names) == sorted(set(before) - int8)
    assert all(".0." in name for name in kept["in ignored_layers (re:\\.0\\.)"])


@pytest.mark.core
def test_sizes_are_those_of_the_tensors(comfy: ModuleType, tiny: MakeTiny) -> None:
    """int8, one fp32 scale a row and the bias, in the dtype of the computation as core has it."""
    source = comfy.load_unet(tiny("wan").path)
    quantized, text = quantize(comfy, source)
    names = quantized_layers(quantized)
    original = source.model.diffusion_model.state_dict()
    before = sum(tensor.nbytes for tensor in original.values())
    after = before
    for name in names:
        weight, bias = (original[f"{name}.{part}"] for part in ("weight", "bias"))
        rows, columns = weight.shape
        after -= weight.nbytes + bias.nbytes
        after += rows * columns + 4 * rows + rows * source.model.get_dtype_inference().itemsize
    stored = quantized.model.diffusion_model.state_dict()
    assert sum(t.nbytes for key, t in stored.items() if not key.endswith("comfy_quant")) == after
    shown = re.search(r"^weights ([\d.]+) MiB -> ([\d.]+) MiB$", text, re.MULTILINE)
    assert shown is not None, text
    assert float(shown[1]) == pytest.approx(before / 2**20, abs=0.06)
    assert float(shown[2]) == pytest.approx(after / 2**20, abs=0.06)


def test_headlines() -> None:
    def headline(quantize: int, already: int, keep: int) -> str:
        layers = [plan.LayerInfo(f"blocks.{i}.a", 256, 8, True) for i in range(quantize)]
        layers += [
            plan.LayerInfo(f"blocks.{i}.b", 256, 8, True, quant_format="int8_tensorwise", group_size=256)
            for i in range(already)
        ]
        layers += [plan.LayerInfo(f"in.{i}", 256, 8, False) for i in range(keep)]
        return report.result_line(plan.make_plan(layers, QuantizeConfig())).text

    assert headline(5, 0, 2) == "quantized 5 of 7 layers"
    assert headline(5, 3, 2) == "quantized 5 of 10 layers (3 were already INT8)"
    assert headline(0, 3, 2) == "quantized 0 of 5 layers: 3 are already INT8, the model passes through"


def test_group_sizes_are_counted() -> None:
    layers = [plan.LayerInfo(f"blocks.{i}.a", width, 8, True) for i, width in enumerate((96, 256, 512, 64))]
    made = plan.make_plan(layers, QuantizeConfig())
    lines = marked(report.weight_lines(made, 2**31, 2**30, 1.26, "cuda:0"))
    assert lines == [
        "weights 2.00 GiB -> 1.00 GiB",
        "ConvRot group 256: 2 layers, group 64: 1 layers, group 16: 1 layers",
        "quantized on cuda:0 in 1.3 s",
    ]


def test_lora_lines_warn_when_no_patch_reaches_a_quantized_layer() -> None:
    def lines(on_int8: int, on_others: int, merged: int = 0) -> list[str]:
        return marked(report.lora_lines(PatchCount(on_int8, on_others), merged))

    warning = "WARNING: a LoRA is attached, but none of its patches reaches an INT8 layer"
    assert lines(0, 0) == ["LoRA: none attached"]
    assert lines(4, 0) == ["LoRA patches: 4 on INT8 layers, 0 on other layers"]
    assert lines(4, 3) == ["LoRA patches: 4 on INT8 layers, 3 on other layers"]
    assert lines(0, 3) == ["LoRA patches: 0 on INT8 layers, 3 on other layers", warning]
    assert lines(0, 0, merged=2) == ["LoRA: merged into 2 weights before quantizing"]
    # A merged LoRA has reached its layers; what is left over is counted without a warning.
    assert lines(0, 1, merged=2) == [
        "LoRA: merged into 2 weights before quantizing",
        "LoRA patches: 0 on INT8 layers, 1 on other layers",
    ]


def test_patches_are_counted_by_the_layer_they_reach() -> None:
    patches = {
        "diffusion_model.blocks.0.a.weight": [1, 2],
        "diffusion_model.blocks.0.a.bias": [1],
        "diffusion_model.blocks.0.norm.weight": [1],
        # Case 7: a doubled prefix, and a name that only begins like a quantized one.
        "diffusion_model.diffusion_model.blocks.0.a.weight": [1],
        "diffusion_model.blocks.0.ab.weight": [1],
    }
    count = count_patches(patches, ["blocks.0.a"])
    assert (count.on_int8, count.on_others, count.total) == (3, 3, 6)


def test_remarks_are_marked() -> None:
    assert marked(report.remark_lines(["one.", "two."])) == ["note: one.", "note: two."]


def quantize(comfy: ModuleType, source: object, **settings: str) -> tuple[object, str]:
    defaults = dict(group_size="auto", layers="blocks", ignored_layers="", lora="keep", device="auto")
    node = comfy.pack_nodes()["KitchenInt8QuantizeModel"]
    return comfy.run_node(node, model=source, **{**defaults, **settings})


def quantized_layers(patcher: object) -> list[str]:
    return [
        name.removesuffix(".comfy_quant")
        for name in patcher.model.diffusion_model.state_dict()
        if name.endswith(".comfy_quant")
    ]
