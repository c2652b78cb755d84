"""A-CFG cases that must be accepted: what we compute equals PEFT loading the same folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import read_geometry
from tests.adapters.adapter_oracle import (
    CONFIG,
    WEIGHTS,
    assert_equals_peft,
    copy_of,
    edit_config,
    edit_tensors,
    first,
    our_deltas,
    plan_for,
    read,
    rename_tensors,
)
from tests.signature import SEVEN, load_base, peft_adapter, tiny_base

UNSLOTH_STYLE = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|o_proj|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)


def test_a_cfg_01_shorthand_string(base: Path, seven: Path, tmp_path: Path) -> None:
    """A-CFG-01: "all-linear" is a shorthand, never a list of letters."""
    folder = edit_config(copy_of(seven, tmp_path / "a"), target_modules="all-linear")
    assert len(assert_equals_peft(folder, base)) == 14
    edit_config(folder, target_modules="All-Linear")
    assert read(folder, base).modules == SEVEN


def test_a_cfg_02_paths_of_any_depth(base: Path, tmp_path: Path) -> None:
    """A-CFG-02: full paths as PEFT writes for all-linear, and mixed depths."""
    full = peft_adapter(base, tmp_path / "full", target_modules="all-linear")
    assert "model.layers.1.mlp.up_proj" in json.loads((full / CONFIG).read_text())["target_modules"]
    assert_equals_peft(full, base)
    targets = ["model.layers.1.mlp.gate_proj", "mlp.up_proj", "q_proj"]
    mixed = peft_adapter(base, tmp_path / "mixed", target_modules=targets)
    deltas = assert_equals_peft(mixed, base)
    assert (1, "gate_proj") in deltas and (0, "gate_proj") not in deltas


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q|v)_proj",
        r"model\.layers\.\d+\.(self_attn\.(q|k)_proj|mlp\.down_proj)",
        r"^(?!.*lm_head).*\.(gate|up)_proj$",
        UNSLOTH_STYLE,
    ],
    ids=["alternation", "nested", "lookahead", "unsloth"],
)
def test_a_cfg_03_regular_expression(base: Path, tmp_path: Path, pattern: str) -> None:
    """A-CFG-03: a string is a regular expression."""
    folder = peft_adapter(base, tmp_path / "a", target_modules=pattern)
    assert json.loads((folder / CONFIG).read_text())["target_modules"] == pattern
    assert_equals_peft(folder, base)


def test_a_cfg_03_list_items_are_no_patterns(base: Path, seven: Path, tmp_path: Path) -> None:
    """A-CFG-03: in a list the same text is a literal suffix, which matches nothing here."""
    folder = edit_config(copy_of(seven, tmp_path / "a"), target_modules=[r".*\.(q|v)_proj"])
    with pytest.raises(AdapterError, match=r"leave model\.layers\.0.*out"):
        read(folder, base)


PREFIX = "base_model.model."


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix(PREFIX),
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: PREFIX + name,
        lambda name: name.removeprefix(PREFIX + "model."),
        lambda name: name.replace(PREFIX, PREFIX + "_orig_mod."),
    ],
    ids=["none", "adapter-segment", "twice", "inner-model", "compiled"],
)
def test_a_cfg_04_other_prefixes(base: Path, seven: Path, tmp_path: Path, rename: Any) -> None:
    """A-CFG-04: unambiguous names are understood."""
    folder = rename_tensors(copy_of(seven, tmp_path / "a"), rename)
    assert_equals_peft(folder, base, oracle=seven)


def test_a_cfg_04_mixed_prefixes(base: Path, seven: Path, tmp_path: Path) -> None:
    """A-CFG-04: names in two forms are ambiguous: refused with one name of each."""
    folder = copy_of(seven, tmp_path / "a")
    rename_tensors(folder, lambda n: n.removeprefix(PREFIX) if "layers.1" in n else n)
    with pytest.raises(AdapterError, match=r"tensor 'model.*another form than 'base_model"):
        read(folder, base)


@pytest.mark.parametrize("segment", ["model.language_model.", "language_model.model."])
def test_a_cfg_05_multimodal_wrapper(base: Path, seven: Path, tmp_path: Path, segment: str) -> None:
    """A-CFG-05: keys of a wrapper that nests the language model bind to the plain base."""
    folder = copy_of(seven, tmp_path / "a")
    rename_tensors(folder, lambda n: n.replace(PREFIX + "model.", PREFIX + segment))
    assert_equals_peft(folder, base, oracle=seven)
    rename_tensors(folder, lambda n: n.replace("language_model.", "vision_tower."))
    with pytest.raises(AdapterError, match="none of 28 tensors belongs to this base"):
        read(folder, base)


def test_a_cfg_07_fused_projections(base: Path, tmp_path: Path) -> None:
    """A-CFG-07: qkv_proj and gate_up_proj are split: A shared, B cut by the base's rows."""
    geometry = read_geometry(base)
    torch.manual_seed(5)
    fused, split = tmp_path / "fused", tmp_path / "split"
    for folder in (fused, split):
        LoraConfig(r=6, lora_alpha=9, target_modules=list(SEVEN)).save_pretrained(folder)
    edit_config(fused, target_modules=["qkv_proj", "gate_up_proj"])
    edit_config(split, target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])
    one: dict[str, Tensor] = {}
    many: dict[str, Tensor] = {}
    for layer in range(2):
        for block, name, members in (
            ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
        ):
            path = f"{PREFIX}model.layers.{layer}.{block}."
            a = torch.randn(6, geometry.hidden_size)
            parts = [torch.randn(geometry.module_shapes[m][1], 6) for m in members]
            one[f"{path}{name}.lora_A.weight"] = a
            one[f"{path}{name}.lora_B.weight"] = torch.cat(parts)
            for member, part in zip(members, parts, strict=True):
                many[f"{path}{member}.lora_A.weight"] = a.clone()
                many[f"{path}{member}.lora_B.weight"] = part
    save_file(one, fused / WEIGHTS)
    save_file(many, split / WEIGHTS)
    assert len(assert_equals_peft(fused, base, oracle=split)) == 10


def test_a_cfg_07_fused_and_alone(base: Path, seven: Path, tmp_path: Path) -> None:
    """A-CFG-07: a projection that comes fused and alone is there twice: refused."""
    folder = edit_config(copy_of(seven, tmp_path / "a"), target_modules="all-linear")

    def add_fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        path = f"{PREFIX}model.layers.0.self_attn.qkv_proj."
        a, b = torch.randn(4, 64), torch.randn(128, 4)
        return tensors | {path + "lora_A.weight": a, path + "lora_B.weight": b}

    edit_tensors(folder, add_fused)
    with pytest.raises(AdapterError, match=r"layer 0 has [qkv]_proj twice"):
        read(folder, base)


@pytest.mark.parametrize("module", ["gate_proj", "up_proj", "v_proj", "k_proj"])
def test_a_cfg_08_part_of_a_group(base: Path, tmp_path: Path, module: str) -> None:
    """A-CFG-08: one member of a packed group alone."""
    folder = peft_adapter(base, tmp_path / "a", target_modules=[module])
    assert read(folder, base).ranks == {(0, module): 8, (1, module): 8}
    assert_equals_peft(folder, base)


@pytest.mark.parametrize(
    ("fields", "key", "scaling"),
    [
        ({"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 32}}, (1, "v_proj"), 16.0),
        ({"rank_pattern": {"layers.1.*q_proj": 16}}, (1, "q_proj"), 0.5),
        ({"alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 40}}, (0, "q_proj"), 10.0),
        ({"alpha_pattern": {"^q_proj": 40}}, (0, "q_proj"), 2.0),
        ({"alpha_pattern": {"attn.q_proj": 40}}, (0, "q_proj"), 2.0),
        ({"alpha_pattern": {"(q|v)_proj": 20}}, (0, "v_proj"), 5.0),
        ({"rank_pattern": {"q_proj": 9}, "use_rslora": True}, (0, "q_proj"), 8 / 3),
    ],
    ids=["module", "layer", "pinned", "pinned-misses", "half-a-name", "regex", "rslora"],
)
@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match")
def test_a_cfg_09_patterns(
    base: Path, tmp_path: Path, fields: dict[str, Any], key: tuple[int, str], scaling: float
) -> None:
    """A-CFG-09: rank and alpha by module, matched by PEFT's own rule."""
    folder = peft_adapter(base, tmp_path / "a", r=4, lora_alpha=8, **fields)
    adapter = read(folder, base)
    assert adapter.scalings[key] == pytest.approx(scaling)
    unused = {"^q_proj", "attn.q_proj"} & set(fields.get("alpha_pattern", ()))
    assert any("matches no adapted module" in note for note in adapter.notes) is bool(unused)
    assert_equals_peft(folder, base)


def test_a_cfg_09_first_key_wins(base: Path, attention: Path, tmp_path: Path) -> None:
    """A-CFG-09: of several matching keys the first in the file counts."""
    folder = copy_of(attention, tmp_path / "a")
    edit_config(folder, alpha_pattern={"self_attn.q_proj": 40, "q_proj": 4})
    assert read(folder, base).scalings[0, "q_proj"] == 5.0
    assert_equals_peft(folder, base)
    edit_config(folder, alpha_pattern={"q_proj": 4, "self_attn.q_proj": 40})
    assert read(folder, base).scalings[0, "q_proj"] == 0.5
    assert_equals_peft(folder, base)


@pytest.mark.parametrize("rank", [4, 16, 64])
def test_a_cfg_10_rank_stabilised(base: Path, tmp_path: Path, rank: int) -> None:
    """A-CFG-10: alpha / sqrt(r)."""
    folder = peft_adapter(base, tmp_path / "a", r=rank, lora_alpha=rank, use_rslora=True)
    assert read(folder, base).scalings[0, "q_proj"] == pytest.approx(rank**0.5)
    assert_equals_peft(folder, base)


def test_a_cfg_12_bias_on_a_base_without(base: Path, tmp_path: Path) -> None:
    """A-CFG-12: PEFT stores no bias where the base has none: then the field is harmless."""
    for bias in ("all", "lora_only"):
        assert_equals_peft(peft_adapter(base, tmp_path / bias, bias=bias), base)


def test_a_cfg_17_both_files(base: Path, seven: Path, attention: Path, tmp_path: Path) -> None:
    """A-CFG-17: safetensors wins over .bin, with a note."""
    folder = copy_of(seven, tmp_path / "a")
    torch.save(load_file(attention / WEIGHTS), folder / "adapter_model.bin")
    assert any("adapter_model.bin is ignored" in note for note in read(folder, base).notes)
    assert_equals_peft(folder, base)


def test_a_cfg_18_one_folder_down(base: Path, tmp_path: Path) -> None:
    """A-CFG-18: PEFT saves an adapter called tenant_a into a subfolder of that name."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(load_base(base), config, adapter_name="tenant_a")
    model.save_pretrained(tmp_path / "a")
    assert (tmp_path / "a" / "tenant_a" / CONFIG).is_file()
    adapter = read(tmp_path / "a", base)
    assert adapter.folder.name == "tenant_a" and any("tenant_a" in n for n in adapter.notes)
    model.save_pretrained(tmp_path / "b")
    shutil.copytree(tmp_path / "b" / "tenant_a", tmp_path / "b" / "tenant_b")
    with pytest.raises(AdapterError, match="several adapters inside: 'tenant_a', 'tenant_b'"):
        read(tmp_path / "b", base)


@pytest.mark.parametrize("value", [None, "", "absent"])
def test_a_cfg_20_no_base_name(base: Path, seven: Path, tmp_path: Path, value: Any) -> None:
    """A-CFG-20: shapes decide, with a note."""
    folder = edit_config(copy_of(seven, tmp_path / "a"), "base_model_name_or_path")
    if value != "absent":
        edit_config(folder, base_model_name_or_path=value)
    adapter = read(folder, base)
    assert adapter.base_model_name is None and any("no base model" in n for n in adapter.notes)


@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")
def test_a_cfg_22_empty_unknown_fields(base: Path, seven: Path, tmp_path: Path) -> None:
    """A-CFG-22: unknown fields are accepted while they are empty."""
    folder = copy_of(seven, tmp_path / "a")
    empty = {"future_field": None, "future_flag": False, "future_list": [], "future_text": ""}
    known = {"corda_config": None, "eva_config": None, "velora_config": None}
    edit_config(folder, **empty, **known, peft_version="99.0", future_object={})
    assert_equals_peft(folder, base)


@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")
def test_a_cfg_23_old_fields(base: Path, attention: Path, tmp_path: Path) -> None:
    """A-CFG-23: retired fields, and PEFT's defaults for all absent ones."""
    folder = copy_of(attention, tmp_path / "a")
    config = json.loads((folder / CONFIG).read_text())
    kept = ("base_model_name_or_path", "peft_type", "r", "lora_alpha", "target_modules")
    old = {"enable_lora": None, "merge_weights": False, "fan_in_fan_out": False}
    (folder / CONFIG).write_text(json.dumps({key: config[key] for key in kept} | old))
    assert_equals_peft(folder, base, oracle=attention)
    edit_config(folder, "target_modules")  # PEFT's default for Llama: q_proj and v_proj
    assert_equals_peft(folder, base, oracle=attention)


@pytest.mark.parametrize("rank", [1, 2, 3, 5, 12, 24, 96, 100])
def test_a_cfg_25_odd_ranks(base: Path, tmp_path: Path, rank: int) -> None:
    """A-CFG-25: any rank is exact; padding up to a tile's 8 or 16 is zero."""
    folder = peft_adapter(base, tmp_path / "a", r=rank, target_modules=list(SEVEN))
    assert_equals_peft(folder, base)


@pytest.mark.parametrize("layers", [[1], [0], 1])
def test_a_cfg_27_some_layers(base: Path, tmp_path: Path, layers: Any) -> None:
    """A-CFG-27: other layers get no delta and cost nothing."""
    folder = peft_adapter(base, tmp_path / "a", layers_to_transform=layers)
    adapter = read(folder, base)
    only = layers if isinstance(layers, int) else layers[0]
    assert {layer for layer, _ in adapter.weights} == {only}
    every = read(peft_adapter(base, tmp_path / "b"), base)
    assert adapter.num_weights * 2 == every.num_weights
    geometry = read_geometry(base)
    assert plan_for(adapter, geometry).used_bytes * 2 == plan_for(every, geometry).used_bytes
    assert_equals_peft(folder, base)


def test_a_cfg_27_layers_pattern(base: Path, tmp_path: Path) -> None:
    """A-CFG-27: with layers_pattern, and a pattern that names another container: refused."""
    folder = peft_adapter(
        base, tmp_path / "a", layers_to_transform=[1], layers_pattern=["h", "layers"]
    )
    assert_equals_peft(folder, base)
    with pytest.raises(AdapterError, match="layers_to_transform leave"):
        read(edit_config(folder, layers_pattern="h"), base)


def test_a_cfg_27_excluded_modules(base: Path, tmp_path: Path) -> None:
    """A-CFG-27: exclude_modules narrows, as suffixes and as a regular expression."""
    for excluded in (["layers.0.self_attn.q_proj", "v_proj"], r".*layers\.1\..*"):
        folder = tmp_path / str(type(excluded))
        peft_adapter(base, folder, target_modules=list(SEVEN), exclude_modules=excluded)
        deltas = assert_equals_peft(folder, base)
        assert (0, "q_proj") in deltas or (1, "q_proj") in deltas


def test_a_cfg_28_dtypes(base: Path, tmp_path: Path) -> None:
    """A-CFG-28: one adapter in four float dtypes; in bf16 all images agree within rounding."""
    images = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        folder = peft_adapter(base, tmp_path / str(dtype), dtype=torch.bfloat16)
        edit_tensors(folder, lambda tensors, d=dtype: {n: t.to(d) for n, t in tensors.items()})
        assert_equals_peft(folder, base)
        images[dtype] = our_deltas(folder, base, torch.bfloat16)
    for dtype, deltas in images.items():
        for key, delta in deltas.items():
            reference = images[torch.float32][key]
            error = float((delta - reference).abs().max() / reference.abs().max())
            assert error <= 2**-7, (dtype, key, error)


@pytest.mark.parametrize(
    "fields",
    [{"lora_alpha": 16.0}, {"lora_dropout": 0}, {"r": 8.0}, {"rank_pattern": {"q_proj": 8.0}}],
    ids=["alpha", "dropout", "r", "pattern"],
)
def test_a_cfg_29_whole_floats(
    base: Path, attention: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """A-CFG-29: numbers in odd JSON types."""
    folder = edit_config(copy_of(attention, tmp_path / "a"), **fields)
    assert_equals_peft(folder, base, oracle=attention)


@pytest.mark.parametrize("init", ["gaussian", "eva", "orthogonal", "mica", False, None])
def test_harmless_initialisations(base: Path, attention: Path, tmp_path: Path, init: Any) -> None:
    """Initialisations that leave the base alone are plain LoRA, as PEFT reloads them."""
    folder = edit_config(copy_of(attention, tmp_path / "a"), init_lora_weights=init)
    if init == "eva":
        edit_config(folder, eva_config={"rho": 2.0})
    assert_equals_peft(folder, base)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_other_families(tmp_path: Path, family: str) -> None:
    """NOOP: every family's modules bind; PEFT's default targets are the same everywhere."""
    other = tiny_base(tmp_path / "base", family, tokenizer=False)
    folder = peft_adapter(other, tmp_path / "a", target_modules=list(SEVEN))
    assert len(assert_equals_peft(folder, other)) == 14
    assert_equals_peft(peft_adapter(other, tmp_path / "b", target_modules=None), other)


def test_sharded_files(base: Path, seven: Path, tmp_path: Path) -> None:
    """Shards with an index hold the same adapter; the digest differs, the numbers do not."""
    folder = shard(copy_of(seven, tmp_path / "a"))
    assert len(read(folder, base).files) == 3
    assert_equals_peft(folder, base, oracle=seven)


def shard(folder: Path) -> Path:
    """Cut the weight file in two, with an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"adapter_model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    return folder


def test_copies_of_base_tensors(base: Path, attention: Path, tmp_path: Path) -> None:
    """Whole base tensors beside the factors are ignored when equal, refused when not."""
    own = load_file(next(base.glob("*.safetensors")))
    folder = copy_of(attention, tmp_path / "a")
    copies = {
        f"{PREFIX}lm_head.weight": own["lm_head.weight"],
        f"{PREFIX}model.embed_tokens.base_layer.weight": own["model.embed_tokens.weight"],
    }
    edit_tensors(folder, lambda tensors: tensors | copies)
    adapter = read(folder, base, base_folder=base)
    assert any("2 copies of base tensors" in note for note in adapter.notes)
    with pytest.raises(AdapterError, match=r"embed_tokens.*not supported|lm_head.*not supported"):
        read(folder, base)  # nothing to compare with

    def change_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[first(tensors, "embed_tokens")][299, 63] += 1
        return tensors

    edit_tensors(folder, change_one)
    with pytest.raises(AdapterError, match=r"tensor '.*embed_tokens\.base_layer\.weight'"):
        read(folder, base, base_folder=base)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_copies_beside_a_base_without_weights(base: Path, tmp_path: Path) -> None:
    """A plan from config.json alone takes PEFT's word for the copies, and says so."""
    folder = peft_adapter(base, tmp_path / "a", target_modules=["q_proj", "lm_head"])
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((base / "config.json").read_bytes())
    adapter = read(folder, base, base_folder=bare)
    assert any("not compared" in note for note in adapter.notes)

    def rename(name: str) -> str:
        return name.replace("lm_head.base_layer.weight", "lm_head.weight")

    with pytest.raises(AdapterError, match=r"lm_head\.weight': an output head that"):
        read(rename_tensors(folder, rename), base, base_folder=bare)
