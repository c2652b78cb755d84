"""AWQ by auto-round and AutoAWQ: stand-ins for both (neither is installed in CI), real refusals.

`tools/quantize_table.py` runs the real ones.
"""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from multilora_cli.engine import quantize_awq
from multilora_cli.engine.quantize_awq import AwqSettings, quantise_awq
from multilora_cli.errors import BadInput, ModelError
from multilora_cli.models.loader import load_decoder
from multilora_cli.models.quantized import base_quantization, placed
from multilora_cli.sizing.geometry import read_geometry
from tests.models import tiny
from tests.models.harness import PagedRunner, Row, log_probability_gap, random_prompts
from tests.models.quantized_kit import KINDS, WIDE, edit_config, requantise
from tests.signature import byte_tokenizer

WINDOWS = random_prompts([256] * 8, tiny.VOCAB)
PROMPT = WINDOWS[0][:30]


def silent(phase: str, done: int, total: int) -> None:
    """Progress that nobody reads."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tiny.save_model(tiny.make_model("llama", **WIDE), tmp_path / "source")
    return byte_tokenizer(folder, tiny.VOCAB + 100)


def rounded(model: Any, folder: Path, group: int) -> None:
    """AutoAWQ's layout of `model`, rounded to nearest."""
    tiny.save_model(model, folder)
    requantise(folder, model, KINDS[f"awq-{group}"])
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")


class FakeAutoRound:
    """Checks auto-round's arguments, talks as it does, and rounds to nearest."""

    def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
        self.model, self.settings = model.float(), settings
        assert settings["bits"] == 4 and settings["sym"] is False
        assert [data.shape for data in settings["dataset"]] == [(1, 256)] * 8
        assert settings["nsamples"] == 8 and settings["seqlen"] == 256

    def quantize(self) -> None:
        """Its bar, as tqdm writes it, beside another one and a word on stdout."""
        sys.stderr.write("\rLoading weights:  50%|#####     | 1/2 [00:00<00:00]")
        for done in (1, 2):
            line = f"\rQuantizing model.layers.{done}:  50%|#####     | {done}/2 [00:12<00:12]"
            sys.stderr.write(line)
        print("quantised 7/7 layers in the block")

    def save_quantized(self, output_dir: str, **how: Any) -> None:
        """As the real one is told to."""
        assert how == {"format": "auto_awq", "inplace": True}
        rounded(self.model, Path(output_dir), self.settings["group_size"])


class FakeAutoAwq:
    """Checks AutoAWQ's arguments and rounds to nearest."""

    def __init__(self, model: Any) -> None:
        self.model, self.group = model, 0

    @classmethod
    def from_pretrained(cls, path: str, trust_remote_code: bool) -> "FakeAutoAwq":
        """Its own default would run code of the checkpoint."""
        assert trust_remote_code is False
        return cls(transformers.AutoModelForCausalLM.from_pretrained(path).float())

    def quantize(
        self,
        tokenizer: Any,
        quant_config: dict[str, Any],
        calib_data: list[list[int]],
        max_calib_samples: int,
        max_calib_seq_len: int,
    ) -> None:
        """Takes what the real one takes."""
        assert calib_data == WINDOWS and (max_calib_samples, max_calib_seq_len) == (8, 256)
        assert quant_config["version"] == "GEMM" and quant_config["w_bit"] == 4
        self.group = quant_config["q_group_size"]

    def save_quantized(self, folder: str) -> None:
        """The same layout."""
        rounded(self.model, Path(folder), self.group)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Stand-ins where `_extra` looks."""
    modules: dict[str, Any] = {
        "auto_round": types.SimpleNamespace(AutoRound=FakeAutoRound),
        "awq": types.SimpleNamespace(AutoAWQForCausalLM=FakeAutoAwq),
        "transformers": transformers,
    }
    monkeypatch.setattr(quantize_awq, "_extra", modules.__getitem__)
    yield modules


def logits_of(folder: Path) -> torch.Tensor:
    geometry, cpu = read_geometry(folder), torch.device("cpu")
    stored = placed(base_quantization(folder, geometry, "auto"), cpu, torch.float32)
    decoder = load_decoder(folder, geometry, cpu, torch.float32, quantization=stored)
    return PagedRunner(decoder).run([Row(PROMPT)])[0]


@pytest.mark.parametrize("method", ["auto-round", "autoawq"])
@pytest.mark.parametrize("group", [None, 64])
def test_output_is_checked_and_complete(
    libraries: dict[str, Any], source: Path, tmp_path: Path, method: Any, group: int | None,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The call, the checkpoint as it is read back, the files beside it, silence, progress."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen: list[tuple[str, int, int]] = []
    how = AwqSettings(WINDOWS, method, group)
    result = quantise_awq(source, tmp_path / "out", how, lambda *step: seen.append(step))
    assert result.storage == f"AWQ INT4, groups of {group or 128}"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    gap = log_probability_gap(logits_of(tmp_path / "out"), logits_of(source))
    assert 0.01 < gap < 10
    if method == "auto-round":
        assert seen == [("layers", 1, 2), ("layers", 2, 2)]
    assert "layers in the block" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("iterations", [0, 20])
def test_steps_of_zero_are_plain_rounding(
    libraries: dict[str, Any], source: Path, tmp_path: Path, iterations: int
) -> None:
    """auto-round would search for ranges all the same unless it is told not to."""
    seen: list[dict[str, Any]] = []

    class Kept(FakeAutoRound):
        def __init__(self, *args: Any, **settings: Any) -> None:
            seen.append(settings)
            super().__init__(*args, **settings)

    libraries["auto_round"].AutoRound = Kept
    how = AwqSettings(WINDOWS, iterations=iterations)
    quantise_awq(source, tmp_path / "out", how, silent)
    assert seen[0]["iters"] == iterations
    assert seen[0].get("disable_opt_rtn", False) is (iterations == 0)


def test_autoawq_on_a_cpu_is_refused(
    libraries: dict[str, Any], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason and the way out; nothing is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="it needs a CUDA device: on a CPU its search") as caught:
        quantise_awq(source, tmp_path / "out", AwqSettings(WINDOWS, "autoawq"), silent)
    assert caught.value.hint is not None and "--method auto-round" in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "extra"), [("auto_round", "quantize"), ("awq", "awq"), ("transformers", "quantize")]
)
def test_a_missing_extra_is_one_line(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named, with the command that installs it."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadInput, match=f"--to awq needs the extra {extra}: ") as caught:
        quantize_awq._extra(module)
    assert caught.value.hint == f"pip install -e '.[{extra}]'"


def test_a_library_that_fails_is_one_line(
    libraries: dict[str, Any], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception, an exit with its reason in the log, an output that is not there."""

    def leave(self: Any) -> None:
        sys.stderr.write("no data has been cached\n")
        raise SystemExit(-1)

    def fail(self: Any) -> None:
        raise RuntimeError("expanded size must match")

    for ending, words in ((leave, "no data has been cached"), (fail, "expanded size must match")):
        monkeypatch.setattr(FakeAutoRound, "quantize", ending)
        with pytest.raises(ModelError, match=f"auto-round failed: .*{words}"):
            quantise_awq(source, tmp_path / "out", AwqSettings(WINDOWS), silent)
    monkeypatch.setattr(FakeAutoRound, "quantize", lambda self: None)
    monkeypatch.setattr(FakeAutoRound, "save_quantized", lambda self, output_dir, **how: None)
    with pytest.raises(ModelError):
        quantise_awq(source, tmp_path / "out", AwqSettings(WINDOWS), silent)
    assert {file.name for file in tmp_path.iterdir()} == {"source"}


def test_group_size_that_does_not_fit(source: Path, tmp_path: Path) -> None:
    edit_config(source, lambda config: config.update(intermediate_size=320))
    for group, found in ((128, 128), (48, 48)):
        with pytest.raises(BadInput, match=f"--group-size: found {found}"):
            quantise_awq(source, tmp_path / "out", AwqSettings(WINDOWS, group_size=group), silent)
