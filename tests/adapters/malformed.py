"""Adapters that must be refused, generated: each kind with the words its error must contain.

`KINDS[name].build(folder)` spoils a good adapter folder (`write_good`) for the F1 base.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.adapters.spoil import (
    CONFIG,
    Q_A,
    Q_B,
    V_B,
    WEIGHTS,
    bin_alone,
    config_bytes,
    config_text,
    duplicate_tensor,
    entry,
    fake_sparse,
    fields,
    header,
    header_text,
    index,
    lookalike,
    loop,
    many,
    overlap,
    raw_file,
    renamed,
    replaced_by,
    shards,
    shift,
    swap,
    symlink,
    tensors,
    value,
    weights,
    without,
)


@dataclass(frozen=True)
class Kind:
    """How to spoil a good folder, and what the error says."""

    build: Callable[[Path], object]
    words: tuple[str, ...]
    when: str = "header"  # or "values": found when the image is built


KINDS: dict[str, Kind] = {
    # folder
    "no-config": Kind(without(CONFIG), ("no adapter_config.json", WEIGHTS)),
    "no-weights": Kind(without(WEIGHTS), ("no weights", WEIGHTS, "index")),
    "empty-folder": Kind(without(CONFIG, WEIGHTS), ("empty folder",)),
    "bin-alone": Kind(bin_alone, ("adapter_model.bin", "pickle")),
    "foreign-format": Kind(lookalike, ("no adapter_config.json", "lora.safetensors")),
    "shards-without-index": Kind(shards, ("1 shards but no", "index")),
    "index-not-object": Kind(index([]), ("weight_map",)),
    "index-leaves-folder": Kind(index({Q_A: "../x.safetensors"}), ("weight_map",)),
    "index-misses-tensors": Kind(
        index({Q_A: "adapter_model-00001-of-00001.safetensors"}), ("index and", "disagree")
    ),
    "index-names-absent-file": Kind(
        index({Q_A: "adapter_model-00002-of-00002.safetensors"}), ("no such file", "00002")
    ),
    "symlink": Kind(replaced_by(symlink), (WEIGHTS, "symlink")),
    "symlink-loop": Kind(replaced_by(loop), (WEIGHTS, "symlink")),
    "config-symlink": Kind(replaced_by(symlink, CONFIG), (CONFIG, "symlink")),
    "fifo": Kind(replaced_by(os.mkfifo), (WEIGHTS, "FIFO")),
    "config-fifo": Kind(replaced_by(os.mkfifo, CONFIG), (CONFIG, "FIFO")),
    "folder-in-place": Kind(replaced_by(Path.mkdir), (WEIGHTS, "folder")),
    # config: form
    "config-empty": Kind(config_bytes(b""), (CONFIG, "not JSON")),
    "config-not-json": Kind(config_bytes(b"r: 8\n"), (CONFIG, "not JSON")),
    "config-list": Kind(config_bytes(b"[]"), (CONFIG, "found list", "object")),
    "config-bom": Kind(config_bytes(b"\xef\xbb\xbf{}"), (CONFIG, "byte order mark")),
    "config-utf16": Kind(config_bytes("{}".encode("utf-16")), (CONFIG, "byte order mark")),
    "config-latin1": Kind(config_bytes(b'{"r": "\xe9"}'), (CONFIG, "not UTF-8 at byte 7")),
    "config-depth": Kind(config_bytes(b"[" * 100_000), (CONFIG, "nested")),
    "config-large": Kind(config_bytes(b" " * (4 * 2**20 + 1)), (CONFIG, "limit")),
    "config-duplicate-key": Kind(
        lambda f: (f / CONFIG).write_text((f / CONFIG).read_text()[:-1] + ', "r": 4}'),
        (CONFIG, "'r' appears twice"),
    ),
    "config-huge-integer": Kind(config_text(r="9" * 5000), (CONFIG, "not JSON")),
    # config: fields
    "r-0": Kind(fields(r=0), ("r: found 0", "positive whole number")),
    "r-negative": Kind(fields(r=-1), ("r: found -1",)),
    "r-fraction": Kind(fields(r=2.5), ("r: found 2.5",)),
    "r-text": Kind(fields(r="8"), ("r: found '8'",)),
    "r-true": Kind(fields(r=True), ("r: found True",)),
    "r-huge": Kind(fields(r=10**9), ("rank 4", "says 1000000000")),
    "r-beyond": Kind(fields(r=10**12), ("r: found 1000000000000",)),
    "r-null": Kind(fields(r=None), ("r: found None",)),
    "r-missing": Kind(
        lambda f: (f / CONFIG).write_text((f / CONFIG).read_text().replace('"r": 4, ', "")),
        ("rank 4", "says 8"),
    ),
    "r-disagrees": Kind(fields(r=8), (Q_A, "rank 4", "says 8")),
    "rank-above-limit": Kind(
        tensors(
            lambda ts: {
                n: t.repeat(17, axis=0 if "lora_A" in n else 1) for n, t in ts.items()
            }
        ),
        ("rank 68", "max_lora_rank is 64"),
    ),
    "alpha-nan": Kind(config_text(lora_alpha="NaN"), (CONFIG, "NaN is not a number")),
    "alpha-infinite": Kind(config_text(lora_alpha="1e999"), ("lora_alpha: found inf",)),
    "alpha-0": Kind(fields(lora_alpha=0), ("lora_alpha: found 0", "base")),
    "alpha-negative": Kind(fields(lora_alpha=-8), ("lora_alpha: found -8",)),
    "alpha-huge": Kind(fields(lora_alpha=10**30), ("lora_alpha", "below 2^31")),
    "alpha-text": Kind(fields(lora_alpha="16"), ("lora_alpha: found '16'", "number")),
    "targets-empty": Kind(fields(target_modules=[]), ("target_modules: empty",)),
    "targets-number": Kind(fields(target_modules=7), ("target_modules: found 7",)),
    "targets-mixed": Kind(fields(target_modules=["q_proj", 1]), ("target_modules",)),
    "targets-unknown": Kind(fields(target_modules=["query"]), (Q_A, "leave")),
    "targets-million": Kind(
        fields(target_modules=["q_proj"] * 100_001), ("target_modules: 100,001 entries",)
    ),
    "targets-bad-regex": Kind(fields(target_modules="(q_proj"), ("target_modules", "pattern")),
    "targets-regex-bomb": Kind(fields(target_modules="(.*)*" * 400 + "x"), (Q_A, "leave")),
    "targets-long-regex": Kind(fields(target_modules="q" * 10_000), ("longer than 8192",)),
    "targets-backreference": Kind(fields(target_modules=r"(.)\1.*"), ("not supported here",)),
    "targets-miss-tensors": Kind(
        fields(target_modules=["q_proj"]), ("v_proj.lora_A", "leave", "v_proj out")
    ),
    "targets-without-tensors": Kind(
        fields(target_modules=["q_proj", "v_proj", "o_proj"]),
        ("model.layers.0.self_attn.o_proj", "declared but has no tensors", "2 modules"),
    ),
    "targets-head": Kind(
        fields(target_modules=["q_proj", "v_proj", "lm_head"]),
        ("target_modules", "lm_head has no tensors"),
    ),
    "targets-string-and-layers": Kind(
        fields(target_modules="all-linear", layers_to_transform=[0]), ("layers_to_transform",)
    ),
    "layers-miss-tensors": Kind(fields(layers_to_transform=[0]), ("layers.1", "leave")),
    "layers-text": Kind(fields(layers_to_transform=["0"]), ("layers_to_transform: found",)),
    "layers-pattern-alone": Kind(fields(layers_pattern="layers"), ("layers_pattern",)),
    "type-missing": Kind(
        lambda f: (f / CONFIG).write_text((f / CONFIG).read_text().replace("peft_type", "x_type")),
        ("peft_type: found None", "expected LORA"),
    ),
    "type-unknown": Kind(fields(peft_type="IA3"), ("peft_type: found 'IA3'", "expected LORA")),
    "rank-pattern-list": Kind(fields(rank_pattern=[4]), ("rank_pattern: found [4]",)),
    "rank-pattern-zero": Kind(fields(rank_pattern={"q_proj": 0}), ("rank_pattern.'q_proj'",)),
    "rank-pattern-disagrees": Kind(fields(rank_pattern={"q_proj": 16}), (Q_A, "says 16")),
    "rank-pattern-bad-regex": Kind(
        fields(rank_pattern={"(q_proj": 4}), ("rank_pattern", "not a regular expression")
    ),
    "alpha-pattern-text": Kind(fields(alpha_pattern={"q_proj": "8"}), ("alpha_pattern.'q_proj'",)),
    "rslora-text": Kind(fields(use_rslora="true"), ("use_rslora: found 'true'",)),
    "dora": Kind(fields(use_dora=True), ("use_dora", "no lora_magnitude_vector")),
    "lora-bias": Kind(fields(lora_bias=True), ("lora_bias", "no lora_B.bias")),
    "bias-unknown": Kind(fields(bias="some"), ("bias: found 'some'",)),
    "modules-to-save": Kind(fields(modules_to_save=["lm_head"]), ("modules_to_save", "lm_head")),
    "fan-in-fan-out": Kind(fields(fan_in_fan_out=True), ("fan_in_fan_out", "transposed")),
    "alora": Kind(fields(alora_invocation_tokens=[1, 2]), ("alora_invocation_tokens",)),
    "layer-replication": Kind(fields(layer_replication=[[0, 1]]), ("layer_replication",)),
    "token-rows": Kind(
        fields(trainable_token_indices=[5]), ("trainable_token_indices", "has no")
    ),
    "target-parameters": Kind(fields(target_parameters=["w"]), ("target_parameters",)),
    "qalora": Kind(fields(use_qalora=True), ("use_qalora",)),
    "bdlora": Kind(fields(use_bdlora={}), ("use_bdlora",)),
    "megatron": Kind(fields(megatron_config={"a": 1}), ("megatron_config",)),
    "arrow": Kind(fields(arrow_config={}), ("arrow_config",)),
    "kasa": Kind(fields(kasa_config={}), ("kasa_config",)),
    "velora": Kind(fields(velora_config={}), ("velora_config",)),
    "monteclora": Kind(fields(monteclora_config={}), ("monteclora_config",)),
    "merged-lora": Kind(fields(enable_lora=[True, False, True]), ("enable_lora",)),
    "init-pissa": Kind(fields(init_lora_weights="pissa_niter_16"), ("init_lora_weights", "base")),
    "init-olora": Kind(fields(init_lora_weights="olora"), ("init_lora_weights", "base")),
    "init-corda": Kind(fields(init_lora_weights="corda"), ("init_lora_weights", "base")),
    "init-loftq": Kind(fields(init_lora_weights="loftq"), ("init_lora_weights", "base")),
    "init-lora-ga": Kind(fields(init_lora_weights="lora_ga"), ("init_lora_weights", "base")),
    "init-unknown": Kind(fields(init_lora_weights="zebra"), ("init_lora_weights: found 'zebra'",)),
    "unknown-field": Kind(fields(future_field=3), ("future_field", "found 3")),
    "unknown-hostile-field": Kind(fields(**{"a\x1b[2J\n": 3}), ("\\x1b[2J\\n",)),
    # header
    **{
        f"file-of-{size}-bytes": Kind(weights(lambda raw, n=size: raw[:n]), (WEIGHTS, "bytes"))  # type: ignore[misc]
        for size in range(8)
    },
    "length-0": Kind(weights(lambda raw: raw_file(b"", b"")), ("does not start with {",)),
    "length-2^63": Kind(
        weights(lambda raw: raw_file(b"{}", length=2**63)), ("9,223,372,036,854,775,808",)
    ),
    "length-2^64-1": Kind(weights(lambda raw: raw_file(b"{}", length=2**64 - 1)), ("claims",)),
    "length-10-gb": Kind(weights(lambda raw: raw_file(b"{}", length=10**10)), ("claims",)),
    "length-99-mb": Kind(
        weights(lambda raw: raw_file(b"{}", b" " * 1024, 99_000_000)), ("claims", "99,000,000")
    ),
    "length-100-mb-real": Kind(fake_sparse(100_000_000), ("100,000,000", "limit")),
    "file-5-gb": Kind(fake_sparse(5 * 2**30), ("5,368,709,128", "limit")),
    "header-not-utf8": Kind(header_text(lambda t: t.replace(b"format", b"form\xff\xfe")), ("UTF",)),
    "header-leading-spaces": Kind(header_text(lambda t: b"  " + t), ("does not start with {",)),
    "header-depth": Kind(header_text(lambda t: b'{"a":' + b"[" * 200_000), ("nested",)),
    "header-list": Kind(header_text(lambda t: b"[]"), ("does not start with {",)),
    "header-garbage-after": Kind(header_text(lambda t: t + b"x"), ("not JSON",)),
    "duplicate-tensor": Kind(header_text(duplicate_tensor), (Q_A, "appears twice")),
    "duplicate-metadata": Kind(
        header_text(lambda t: b'{"__metadata__":{},' + t[1:]), ("'__metadata__' appears twice",)
    ),
    "metadata-number": Kind(
        header(lambda p: p.update(__metadata__={"format": 1})), ("__metadata__", "strings")
    ),
    "metadata-list": Kind(header(lambda p: p.update(__metadata__=[])), ("__metadata__",)),
    "20,001-tensors": Kind(weights(lambda raw: many(20_001)), ("20,001 tensors", "20,000")),
    # tensors in the header
    "overlap": Kind(header(overlap), ("begins", "before the end")),
    "hole": Kind(header(shift, pad=b"\0" * 16), ("begins 16 bytes after",)),
    "trailing-bytes": Kind(weights(lambda raw: raw + b"\0" * 8), ("the file holds",)),
    "one-byte-short": Kind(weights(lambda raw: raw[:-1]), (WEIGHTS,)),
    "half-the-file": Kind(weights(lambda raw: raw[: len(raw) // 2]), (WEIGHTS, "within the file")),
    "offset-negative": Kind(entry(data_offsets=[-1, 1024]), (Q_A, "data_offsets", "-1")),
    "offset-minus-zero": Kind(
        header_text(lambda t: t.replace(b"[0,", b"[-0,")), ("negative number -0",)
    ),
    "offset-float": Kind(entry(data_offsets=[0.0, 1024]), (Q_A, "data_offsets", "0.0")),
    "offset-swapped": Kind(header(swap), (Q_A, "data_offsets")),
    "offset-beyond": Kind(entry(data_offsets=[0, 2**40]), (Q_A, "within the file")),
    "offset-one": Kind(entry(data_offsets=[0]), (Q_A, "data_offsets")),
    "shape-overflow": Kind(entry(shape=[2**32, 2**32, 2**32]), (Q_A, "bytes")),
    "shape-wraps-to-right": Kind(entry(shape=[2**47, 2**47, 2**10]), (Q_A, "bytes")),
    "shape-beyond": Kind(entry(shape=[2**63]), (Q_A, "shape")),
    "shape-negative": Kind(entry(shape=[-4, -64]), (Q_A, "shape")),
    "shape-text": Kind(entry(shape=["4", 64]), (Q_A, "shape")),
    "shape-true": Kind(entry(shape=[True, 256]), (Q_A, "shape")),
    "shape-9-dimensions": Kind(entry(shape=[4, 64] + [1] * 7), (Q_A, "shape", "at most 8")),
    "shape-missing": Kind(header(lambda p: p[Q_A].pop("shape")), (Q_A, "expected dtype, shape")),
    "entry-extra": Kind(entry(scale=2), (Q_A, "expected dtype, shape")),
    "entry-number": Kind(header(lambda p: p.update({Q_A: 5})), (Q_A, "expected dtype")),
    "dtype-unknown": Kind(entry(dtype="F31"), (Q_A, "unknown dtype 'F31'")),
    "dtype-number": Kind(entry(dtype=32), (Q_A, "unknown dtype")),
    "name-nul": Kind(renamed(Q_A, Q_A + "\0"), ("\\x00", "printable")),
    "name-escape": Kind(renamed(Q_A, "\x1b]0;x\x07" + Q_A), ("\\x1b]0;x", "printable")),
    "name-bidi": Kind(renamed(Q_A, "\u202e" + Q_A), ("\\u202e", "printable")),
    "name-empty": Kind(renamed(Q_A, ""), ("tensor name ''",)),
    "name-1-mb": Kind(renamed(Q_A, "a" * 2**20), ("512 printable",)),
    "name-dots": Kind(renamed(Q_A, "../../" + Q_A), ("../../", "not supported")),
    # tensors against the base
    "no-tensors": Kind(tensors(lambda ts: {}), ("no tensors", "ZeRO-3")),
    "zero-rank": Kind(
        tensors(lambda ts: ts | {Q_A: ts[Q_A][:0], Q_B: ts[Q_B][:, :0]}), (Q_A, "empty", "ZeRO-3")
    ),
    "zero-shape": Kind(tensors(lambda ts: ts | {Q_B: ts[Q_B][:0, 0]}), (Q_B, "empty", "ZeRO-3")),
    "ranks-disagree": Kind(
        tensors(lambda ts: ts | {Q_B: ts[Q_B][:, :3]}), (Q_B, "rank 3", "rank 4")
    ),
    "a-without-b": Kind(
        tensors(lambda ts: {n: t for n, t in ts.items() if n != Q_B}), (Q_A, "no lora_B")
    ),
    "b-without-a": Kind(
        tensors(lambda ts: {n: t for n, t in ts.items() if n != Q_A}), (Q_B, "no lora_A")
    ),
    "wrong-input": Kind(
        tensors(lambda ts: ts | {Q_A: ts[Q_A][:, :60]}),
        (Q_A, "[4, 60]", "[4, 64]", "1 of 8 tensors"),
    ),
    "wrong-output": Kind(
        tensors(lambda ts: ts | {V_B: ts[V_B].repeat(2, 0)}), (V_B, "[64, 4]", "[32, 4]")
    ),
    "one-dimension": Kind(
        tensors(lambda ts: ts | {Q_A: ts[Q_A].reshape(-1)}), (Q_A, "[256]", "two dimensions")
    ),
    "dtype-i8": Kind(tensors(lambda ts: ts | {Q_A: ts[Q_A].astype(np.int8)}), (Q_A, "I8", "BF16")),
    "dtype-bool": Kind(tensors(lambda ts: ts | {Q_A: ts[Q_A] > 0}), (Q_A, "BOOL", "BF16")),
    "dtype-f8": Kind(entry(dtype="F8_E4M3", shape=[16, 64]), (Q_A, "F8_E4M3", "BF16")),
    "unknown-prefix": Kind(
        tensors(lambda ts: {"transformer." + n: t for n, t in ts.items()}),
        ("none of 8 tensors", "transformer.", "expected names such as"),
    ),
    "layers-renamed": Kind(
        tensors(lambda ts: {n.replace("layers", "blocks"): t for n, t in ts.items()}),
        ("none of 8 tensors", "blocks", "expected names such as"),
    ),
    "unknown-module": Kind(
        renamed(Q_A, Q_A.replace("q_proj", "c_attn")), ("c_attn", "does not have")
    ),
    "wrong-block": Kind(
        tensors(lambda ts: {n.replace("layers.0.self_attn", "layers.0.mlp"): t
                            for n, t in ts.items()}),
        ("layers.0.mlp.q_proj", "does not have"),
    ),
    "layer-07": Kind(renamed(Q_A, Q_A.replace("layers.0", "layers.07")), ("layers.07",)),
    "layer-too-many": Kind(
        tensors(lambda ts: {n.replace("layers.1", "layers.2"): t for n, t in ts.items()}),
        ("layer 2", "the base has 2 layers", "4 of 8 tensors"),
    ),
    "key-under-two-prefixes": Kind(
        tensors(lambda ts: ts | {Q_A.removeprefix("base_model.model."): ts[Q_A]}),
        ("another form than",),
    ),
    "two-adapter-segments": Kind(
        tensors(lambda ts: {
            n.replace(".weight", ".a.weight" if "layers.0" in n else ".b.weight"): t
            for n, t in ts.items()
        }),
        ("another form than",),
    ),
    "stray-tensor": Kind(
        tensors(lambda ts: ts | {"note": np.ones(3, np.float32)}), ("tensor 'note'", "unknown")
    ),
    "dora-magnitude": Kind(
        tensors(lambda ts: ts | {Q_A.replace("lora_A.weight", "lora_magnitude_vector"):
                                 np.ones(64, np.float32)}),
        ("lora_magnitude_vector", "does not say use_dora"),
    ),
    # values, found when the image is built
    "nan-in-a": Kind(value(Q_A, 7, np.nan), (Q_A, "1 NaN and 0 infinite of 256"), "values"),
    "nan-in-b": Kind(value(Q_B, 0, np.nan), (Q_B, "1 NaN"), "values"),
    "nan-last": Kind(value(V_B, -1, np.nan), (V_B, "1 NaN"), "values"),
    "all-nan": Kind(value(Q_B, slice(None), np.nan), (Q_B, "256 NaN"), "values"),
    "infinite": Kind(value(V_B, 3, np.inf), (V_B, "0 NaN and 1 infinite"), "values"),
    "minus-infinite": Kind(value(Q_A, 3, -np.inf), (Q_A, "1 infinite"), "values"),
    "scaling-overflows": Kind(value(Q_B, 5, -3e38), (Q_B, "1 of 256", "overflow"), "values"),
}  # fmt: skip
