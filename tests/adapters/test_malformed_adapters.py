"""The malformed corpus: every kind is refused, naming what is wrong (F30, F39, F40, F41)."""

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from multilora_cli.adapters.image import build_image
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import read_geometry
from tests.adapters.adapter_oracle import (
    assert_equals_peft,
    base_rows,
    built,
    copy_of,
    edit_config,
    edit_tensors,
    first,
    plan_for,
    read,
    rename_tensors,
)
from tests.adapters.malformed import KINDS
from tests.adapters.spoil import Q_A, WEIGHTS, write_good
from tests.signature import load_base, peft_adapter, tiny_base


def test_the_good_adapter_is_good(base: Path, tmp_path: Path) -> None:
    """What the kinds spoil is accepted and equals PEFT, so only the spoiling is refused."""
    folder = write_good(tmp_path / "a")
    assert_equals_peft(folder, base)
    assert len(KINDS) >= 64


@pytest.mark.parametrize("name", KINDS)
def test_malformed(base: Path, tmp_path: Path, name: str) -> None:
    """LOAD, RANK, SCALE, NOOP: refused with file and field or tensor, in printable text."""
    kind = KINDS[name]
    folder = write_good(tmp_path / "acme")
    kind.build(folder)
    with pytest.raises(AdapterError) as caught:
        adapter = read(folder, base, max_rank=64)
        assert kind.when == "values"
        built(adapter, plan_for(adapter, read_geometry(base)))
    message = str(caught.value)
    for word in kind.words:
        assert word in message, (word, message)
    assert message.isprintable() and len(message) < 700
    assert str(folder) in message  # names the adapter's folder
    assert caught.value.reason


def test_a_cfg_06_nothing_binds(base: Path, attention: Path, tmp_path: Path) -> None:
    """A-CFG-06: no bound tensor is an error with the count, one found and one expected name."""
    folder = rename_tensors(copy_of(attention, tmp_path / "a"), lambda n: n.replace("layers", "h"))
    with pytest.raises(AdapterError, match=r"none of 8 tensors.*model\.h\.0.*expected names such"):
        read(folder, base)


def test_a_cfg_22_unknown_field_with_a_value(base: Path, tmp_path: Path) -> None:
    """A-CFG-22: a field not known here is named as soon as it carries a value, 0 included."""
    for value in (3, 0, 0.0, "x", True, [0], {"a": None}):
        folder = write_good(tmp_path / "a", future_field=value)
        with pytest.raises(AdapterError, match="'future_field': found") as caught:
            read(folder, base)
        assert caught.value.reason == "unknown_field"


@pytest.mark.parametrize("rank", [0, -1, 7.5, "8", True, None, [4]])
def test_a_cfg_29_wrong_numbers(base: Path, tmp_path: Path, rank: object) -> None:
    """A-CFG-29: r 0, negative, broken, text: refused by field name, in patterns too."""
    for fields, name in (({"r": rank}, "r"), ({"rank_pattern": {"q_proj": rank}}, "rank_pattern")):
        with pytest.raises(AdapterError, match=f"{name}.*: found .*positive whole number"):
            read(write_good(tmp_path / name, **fields), base)


def test_a_cfg_32_other_formats(base: Path, tmp_path: Path) -> None:
    """A-CFG-32: another tool's folder, another PEFT method: what was found and expected."""
    folder = write_good(tmp_path / "a")
    (folder / "adapter_config.json").unlink()
    (folder / WEIGHTS).rename(folder / "lora.safetensors")
    with pytest.raises(AdapterError, match=r"found 'lora\.safetensors'") as caught:
        read(folder, base)
    assert "expected PEFT's format: adapter_config.json" in str(caught.value.hint)
    with pytest.raises(AdapterError, match="peft_type: found 'LOHA', expected LORA"):
        read(write_good(tmp_path / "b", peft_type="LOHA"), base)


def test_regular_expressions_that_explode_are_decided(base: Path, tmp_path: Path) -> None:
    """LOAD: patterns on which `re` never ends are matched in bounded time, right or refused."""
    bomb = "(.*)*" * 400 + "x"
    folder = write_good(tmp_path / "a", rank_pattern={bomb: 4}, alpha_pattern={"(q|v|_)*j+": 4})
    notes = read(folder, base).notes
    assert sum("matches no adapted module" in note for note in notes) == 2
    late = r".*\.(q|v)_proj|.*embed_tokens(?>x)?"  # undecided only where it gets that far
    with pytest.raises(AdapterError, match=f"{folder}/adapter_config.json.*atomic"):
        read(edit_config(folder, target_modules=late), base)
    edit_config(folder, target_modules=["q_proj", "v_proj"])
    with pytest.raises(AdapterError, match="takes too long to match"):
        read(edit_config(folder, rank_pattern={"(?:(?:a|b|c|d|e|f|.)?){9}" * 300: 4}), base)


def test_refusals_open_nothing_for_good(base: Path, tmp_path: Path) -> None:
    """A refused file leaves no open descriptor behind."""
    before = len(os.listdir("/proc/self/fd"))
    for name in ("overlap", "fifo", "symlink", "all-nan", "one-byte-short", "file-of-3-bytes"):
        folder = write_good(tmp_path / name)
        KINDS[name].build(folder)
        with pytest.raises(AdapterError):
            adapter = read(folder, base)
            built(adapter, plan_for(adapter, read_geometry(base)))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_cfg_11_dora(base: Path, tmp_path: Path) -> None:
    """A-CFG-11: magnitudes and the field go together; shape and values are checked."""
    folder = peft_adapter(base, tmp_path / "a", use_dora=True)
    assert {kind for *_, kind in read(folder, base).extras.vectors} == {"scale"}
    with pytest.raises(AdapterError, match=r"lora_magnitude_vector.*does not say use_dora"):
        read(edit_config(folder, use_dora=False), base)
    edit_config(folder, use_dora=True)
    spoiled = copy_of(folder, tmp_path / "b")
    edit_tensors(spoiled, lambda t: {**t, first(t, "magnitude"): torch.ones(63)})
    with pytest.raises(AdapterError, match=r"magnitude_vector'.*shape \[63\], the base needs"):
        read(spoiled, base)
    edit_tensors(
        spoiled,
        lambda t: {**t, first(t, "magnitude"): t[first(t, "A.w")].new_full((64,), torch.nan)},
    )
    adapter = read(spoiled, base)
    with pytest.raises(AdapterError, match=r"magnitude_vector': 64 NaN"):
        built(adapter, plan_for(adapter, read_geometry(base)), base=base_rows(base))


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_a_cfg_12_bias(tmp_path: Path, bias: str) -> None:
    """A-CFG-12: exactly the biases that the field declares, or none at all with a note."""
    base = tiny_base(tmp_path / "base", tokenizer=False, attention_bias=True)
    folder = peft_adapter(base, tmp_path / "a", bias=bias)
    found = read(folder, base).biases
    assert len(found) == 2 * (4 if bias == "all" else 2)
    partly = copy_of(folder, tmp_path / "partly")
    edit_tensors(partly, lambda t: {k: v for k, v in t.items() if k != first(t, ".bias")})
    with pytest.raises(AdapterError, match=rf"bias: {bias} is declared but layer 0 .* has no bias"):
        read(partly, base)
    edit_tensors(partly, lambda t: {k: v for k, v in t.items() if ".bias" not in k})
    assert any("none is stored" in note for note in read(partly, base).notes)
    with pytest.raises(AdapterError, match=r"tensor '.*bias': a trained bias, which"):
        read(edit_config(folder, bias="none"), base)


def test_a_bias_where_the_base_has_none(base: Path, tmp_path: Path) -> None:
    """The base would have to grow one: made for another base."""
    folder = peft_adapter(base, tmp_path / "a", bias="all")
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias"
    edit_tensors(folder, lambda t: {**t, name: torch.ones(64)})
    with pytest.raises(AdapterError, match=r"bias': the base has no bias there"):
        read(folder, base)


def test_a_cfg_13_modules_to_save(base: Path, tmp_path: Path) -> None:
    """A-CFG-13: saved head and embedding are served; other modules and strays are refused."""
    folder = peft_adapter(base, tmp_path / "a", modules_to_save=["lm_head"])
    adapter = read(folder, base)
    assert adapter.extras.matrices == {("lm_head.weight", 300, 64)}
    assert adapter.modules == ("q_proj", "v_proj", "lm_head")
    edit_tensors(folder, lambda t: {k: v + 1 if "lm_head" in k else v for k, v in t.items()})
    with pytest.raises(
        AdapterError, match=r"lm_head\.weight': an output head that modules_to_save"
    ):
        read(edit_config(folder, modules_to_save=None), base, base_folder=base)
    with pytest.raises(AdapterError, match=r"modules_to_save: embed_tokens is declared but has no"):
        read(edit_config(folder, modules_to_save=["lm_head", "embed_tokens"]), base)
    with pytest.raises(AdapterError, match=r"modules_to_save: found 'model\.norm'.*merge it"):
        read(edit_config(folder, modules_to_save=["lm_head", "model.norm"]), base)
    edit_config(folder, modules_to_save=["lm_head"])
    edit_tensors(folder, lambda t: {k: v / 0 if "lm_head" in k else v for k, v in t.items()})
    adapter = read(folder, base)
    with pytest.raises(AdapterError, match=r"lm_head\.weight': \d+ NaN and \d+ infinite"):
        built(adapter, plan_for(adapter, read_geometry(base)))


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_cfg_14_tied_head(tmp_path: Path) -> None:
    """A-CFG-14: LoRA on one end of a tied pair is served; shared by both it is refused by name."""
    base = tiny_base(tmp_path / "base", tokenizer=False, tie_word_embeddings=True)
    folder = peft_adapter(base, tmp_path / "a", target_modules=["lm_head", "q_proj"])
    adapter = read(folder, base, base_folder=base)
    assert set(adapter.edges.lora) == {"lm_head"} and adapter.max_rank == 8
    with pytest.raises(AdapterError, match="ensure_weight_tying: one LoRA shared"):
        read(edit_config(folder, ensure_weight_tying=True), base, base_folder=base)
    edit_config(folder, ensure_weight_tying=False)
    with pytest.raises(AdapterError, match="target_modules: lm_head is adapted but left out"):
        read(edit_config(folder, target_modules=["q_proj"]), base, base_folder=base)


def test_a_cfg_14_dora_on_the_head(base: Path, tmp_path: Path) -> None:
    """Refused with the way out."""
    with pytest.warns(UserWarning, match="save_embedding_layers"):
        folder = peft_adapter(base, tmp_path / "a", target_modules=["lm_head"], use_dora=True)
    with pytest.raises(AdapterError, match=r"DoRA.*lm_head is not supported; leave"):
        read(folder, base, base_folder=base)


def test_a_cfg_15_grown_vocabulary(base: Path, tmp_path: Path) -> None:
    """A-CFG-15: two more rows: both shapes and the likely cause."""
    folder = write_good(tmp_path / "a")
    name = "base_model.model.model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors | {name: torch.ones(302, 64)})
    for options in ({}, {"base_folder": base}):
        with pytest.raises(AdapterError) as caught:
            read(folder, base, **options)
        for word in (name, "[302, 64]", "[300, 64]", "tokens were added"):
            assert word in str(caught.value)


def test_a_cfg_16_token_rows(base: Path, tmp_path: Path) -> None:
    """A-CFG-16: rows of single tokens: ids, shapes and tensors agree, or it is refused."""
    folder = peft_adapter(base, tmp_path / "a", trainable_token_indices=[5, 9])
    assert read(folder, base).edges.token_rows["embed_tokens"].tokens == (5, 9)
    for wrong, words in {
        "[5]": r"shape \[2, 64\], the base needs \[1, 64\]",
        "[5, 300]": "not different ones below 300",
        "[5, 5]": "not different ones",
        "[5, -1]": "expected a list of token ids",
        '{"norm": [5, 9]}': "found 'norm', expected embed_tokens or lm_head",
        '{"embed_tokens": [5, 9], "lm_head": [1]}': "lm_head has no trainable_tokens_delta",
        "null": r"the base needs \[0, 64\]",
    }.items():
        edit_config(folder, trainable_token_indices=json.loads(wrong))
        with pytest.raises(AdapterError, match=words):
            read(folder, base)


def test_a_cfg_17_bin_alone_and_a_sec_03(base: Path, tmp_path: Path) -> None:
    """A-CFG-17, A-SEC-03: a pickle is never opened; the refusal names the conversion."""
    folder = write_good(tmp_path / "a")
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(marker),))

    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(AdapterError) as caught:
        read(folder, base)
    assert caught.value.reason == "pickle" and not marker.exists()
    assert "weights_only=True" in str(caught.value.hint)


def test_the_conversion_command_works(base: Path, tmp_path: Path) -> None:
    """A-CFG-17: the command in the hint turns a .bin folder into one that is served."""
    folder = write_good(tmp_path / "a")
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterError) as caught:
        read(folder, base)
    command = str(caught.value.hint).partition("folder: ")[2]
    code = re.fullmatch(r'python -c "(.*)"', command)
    assert code is not None
    subprocess.run([sys.executable, "-c", code[1]], cwd=folder, check=True)
    assert_equals_peft(folder, base, oracle=write_good(tmp_path / "b"))


def test_a_cfg_19_wrong_folder(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-CFG-19: the absolute path tried, and what was looked for."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    good = write_good(tmp_path / "good")
    for path in ("good", "good/", "~/good", str(good)):
        assert read(Path(path), base).folder == good
    for path, words in {
        base: ("no adapter_config.json", "base model"),
        Path("empty"): (str(tmp_path / "empty"), "empty folder"),
        good / WEIGHTS: ("is a file",),
        Path("~/gone"): (str(tmp_path / "gone"), "no such folder"),
        Path("nul\0"): ("not readable",),
    }.items():
        with pytest.raises(AdapterError) as caught:
            read(path, base)
        text = f"{caught.value} {caught.value.hint}"
        assert all(word in text for word in words), text


def test_a_cfg_21_other_base(tmp_path: Path) -> None:
    """A-CFG-21: first mismatch with both shapes, and how many there are."""
    small = tiny_base(tmp_path / "small", tokenizer=False)
    wide = tiny_base(tmp_path / "wide", tokenizer=False, intermediate_size=192)
    deep = tiny_base(tmp_path / "deep", tokenizer=False, num_hidden_layers=3)
    mlp = ["gate_proj", "down_proj"]
    folder = peft_adapter(small, tmp_path / "a", target_modules=mlp)
    with pytest.raises(AdapterError, match=r"\[8, 128\], the base needs \[8, 192\]; 4 of 8 tensor"):
        read(folder, wide)
    folder = peft_adapter(deep, tmp_path / "b", target_modules=mlp)
    with pytest.raises(AdapterError, match=r"layer 2, the base has 2 layers.* 4 of 12 tensors"):
        read(folder, small)
    with pytest.raises(AdapterError, match="declared but has no tensors; 2 modules"):
        read(peft_adapter(small, tmp_path / "c", target_modules=mlp), deep)


def test_a_cfg_24_rank_limit(base: Path, tmp_path: Path) -> None:
    """A-CFG-24: no flag needed up to the limit; above it both numbers are named."""
    folder = peft_adapter(base, tmp_path / "a", r=128)
    assert read(folder, base).max_rank == 128
    with pytest.raises(AdapterError, match="rank 128, the limit max_lora_rank is 64"):
        read(folder, base, max_rank=64)


def test_a_cfg_26_empty_tensors(base: Path, tmp_path: Path) -> None:
    """A-CFG-26: what ZeRO-3 leaves behind, as a 40-byte file too."""
    folder = write_good(tmp_path / "a")
    (folder / WEIGHTS).write_bytes((32).to_bytes(8, "little") + b"{}".ljust(32))
    with pytest.raises(AdapterError, match=r"no tensors.*ZeRO-3"):
        read(folder, base)
    folder = write_good(tmp_path / "b")
    edit_tensors(folder, lambda tensors: {name: torch.zeros(0) for name in tensors})
    with pytest.raises(AdapterError, match=r"shape \[0\].*ZeRO-3"):
        read(folder, base)


def test_a_cfg_33_non_finite(base: Path, tmp_path: Path) -> None:
    """A-CFG-33: any NaN or infinity, in any dtype of file and image, named with its count."""
    geometry = read_geometry(base)
    for stored in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for bad in (float("nan"), float("inf"), float("-inf")):
            folder = write_good(tmp_path / f"{stored}{bad}")

            def spoil(
                tensors: dict[str, torch.Tensor],
                stored: torch.dtype = stored,
                bad: float = bad,
            ) -> dict[str, torch.Tensor]:
                tensors = {name: t.to(stored) for name, t in tensors.items()}
                tensors[Q_A].view(-1)[[0, 255]] = bad
                return tensors

            edit_tensors(folder, spoil)
            adapter = read(folder, base)
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                with pytest.raises(AdapterError, match=re.escape(Q_A)) as caught:
                    built(adapter, plan_for(adapter, geometry, dtype), dtype)
                assert "2 of" not in str(caught.value)
                assert re.search("2 NaN|2 infinite", str(caught.value))
                assert caught.value.reason == "not_finite"


def test_a_cfg_28_overflow(base: Path, tmp_path: Path) -> None:
    """A-CFG-28, F40: values that float16 cannot hold are refused with tensor, count and scaling."""
    folder = write_good(tmp_path / "a")

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[Q_A.replace("lora_A", "lora_B")].view(-1)[:3] = 40_000.0
        return tensors

    adapter, geometry = read(edit_tensors(folder, spoil), base), read_geometry(base)
    built(adapter, plan_for(adapter, geometry, torch.bfloat16), torch.bfloat16)
    with pytest.raises(
        AdapterError, match=r"3 of 256 values overflow torch.float16 with scaling 2"
    ):
        built(adapter, plan_for(adapter, geometry, torch.float16), torch.float16)


def test_pissa_is_refused_because_it_would_be_wrong(base: Path, tmp_path: Path) -> None:
    """SCALE: PiSSA moves the base weight, so its saved factors are not the change they made."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights="pissa")
    original = load_base(base).model.layers[0].self_attn.q_proj.weight
    model = get_peft_model(load_base(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    factors = layer.get_delta_weight("default").detach()
    change = layer.base_layer.weight.detach() + factors - original.detach()
    assert float((change - factors).abs().max()) > 0.1 * float(factors.abs().max())
    model.save_pretrained(tmp_path / "a")
    with pytest.raises(AdapterError, match="init_lora_weights: found 'pissa'") as caught:
        read(tmp_path / "a", base)
    assert "path_initial_model_for_weight_conversion" in str(caught.value.hint)


def test_config_names_code_that_is_never_run(base: Path, tmp_path: Path) -> None:
    """RELIABILITY 3.1: modules named in a config are data: nothing is imported."""
    folder = write_good(tmp_path / "a")
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
    mapping = {"parent_library": "evil_module", "base_model_class": "X"}
    sys.path.insert(0, str(tmp_path))
    try:
        read(edit_config(folder, auto_mapping=mapping, megatron_core="evil_module"), base)
    finally:
        sys.path.remove(str(tmp_path))
    assert "evil_module" not in sys.modules


def halves(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Ranks of A where B has none."""
    tensor[2:] *= "lora_B" in name
    tensor[:, :2] *= "lora_A" in name
    return tensor


@pytest.mark.parametrize(
    "spoil",
    [
        lambda name, tensor: tensor * ("lora_B" not in name),
        lambda name, tensor: tensor * ("lora_A" not in name),
        lambda name, tensor: halves(name, tensor),
    ],
    ids=["B is zero", "A is zero", "their product is zero"],
)
def test_a_zero_product_is_noted(
    base: Path, tmp_path: Path, spoil: Callable[[str, torch.Tensor], torch.Tensor]
) -> None:
    """NOOP: an untrained adapter (B = 0) is served as PEFT serves it, and says so; any other whose
    product is zero too."""
    folder = write_good(tmp_path / "a")
    edit_tensors(folder, lambda ts: {n: spoil(n, t) for n, t in ts.items()})
    adapter, geometry = read(folder, base), read_geometry(base)
    plan = plan_for(adapter, geometry)
    out = torch.empty(plan.num_pages, plan.page_bytes, dtype=torch.uint8)
    notes = build_image(adapter, plan, torch.float32, out)
    assert notes == ("every product of lora_B and lora_A is zero: answers equal the base's",)
