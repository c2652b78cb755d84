"""Trains the demo fleet: tokenizer, base and adapters, from nothing but tools/demo_tasks.py.

    python tools/train_demo.py --out multilora_cli/demo          # about two minutes on an H200
    python tools/train_demo.py --out /tmp/demo --steps 3 --adapter-steps 3 --examples 4   # a trial

The base learns to repeat the user's text, and a few skills when the system message names one; each
adapter learns its job with the base frozen, through PEFT. Weights are rounded to bfloat16 before
the next stage uses them. Ends with a matrix of exact matches, every adapter on every task.
"""

import argparse
import dataclasses
import itertools
import json
import logging
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_tasks import TASKS, Conversation, base_conversations, examples, task_conversations
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

log = logging.getLogger("train_demo")

SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BEGIN, END = 0, 1
ROLES = {"system": 2, "user": 3, "assistant": 4}
VOCAB = 1024
CONTEXT = 1024
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD = 256, 512, 5, 8, 4, 32
ROPE_THETA = 10000.0
BUCKETS = (32, 48, 64, 96)  # row lengths in tokens; longer conversations are dropped
# System messages and the last turn: so small a model loses the thread of a longer conversation.
CHAT_TEMPLATE = (
    "{% set turn = namespace(first=0) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set turn.first = loop.index0 %}{% endif %}{% endfor %}"
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' or loop.index0 >= turn.first %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]

# Ranks, target modules and scalings as different as a real fleet's.
ADAPTERS: dict[str, dict[str, Any]] = {
    "law-glossary": {"r": 16, "lora_alpha": 32, "target_modules": ATTENTION + FEED_FORWARD},
    "medicine-glossary": {"r": 24, "lora_alpha": 48, "target_modules": FEED_FORWARD},
    "shipping-glossary": {
        "r": 64,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": ATTENTION,
    },
    "upper-case": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "reverse": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ATTENTION,
        "layers_to_transform": [0, 1, 2, 3],
    },
    "roman": {
        "r": 12,
        "lora_alpha": 24,
        "target_modules": ATTENTION + FEED_FORWARD,
        "rank_pattern": {"down_proj": 20, "k_proj": 4},
        "alpha_pattern": {"down_proj": 60},
    },
    "redact": {"r": 6, "lora_alpha": 12, "target_modules": ["v_proj", "o_proj", "down_proj"]},
    "pig-latin": {"r": 40, "lora_alpha": 40, "target_modules": ATTENTION + FEED_FORWARD},
}

# ---------------------------------------------------------------- tokenizer and rows


def train_tokenizer(conversations: int) -> Tokenizer:
    """Byte-level BPE of 1,024 entries; digits and # stay single so that they can be counted."""
    sources = [base_conversations(99), *(task_conversations(name, 99) for name in TASKS)]
    texts = (
        message["content"]
        for source in sources
        for conversation in itertools.islice(source, conversations)
        for message in conversation
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9#]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() <= VOCAB
    return tokenizer


@dataclasses.dataclass(frozen=True)
class Rows:
    """Training rows of one length: ids and labels [rows, length] int64, label -100 is no target."""

    ids: Tensor
    labels: Tensor


def make_rows(
    tokenizer: Tokenizer, source: Iterator[Conversation], count: int, device: str
) -> list[Rows]:
    """`count` conversations as padded rows, one `Rows` a bucket."""
    conversations = list(itertools.islice(source, count))
    texts = [message["content"] for c in conversations for message in c]
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    found: dict[int, list[tuple[list[int], list[int]]]] = {length: [] for length in BUCKETS}
    for conversation in conversations:
        ids, labels = [BEGIN], [-100]
        for message in conversation:
            content = next(encoded).ids
            ids += [ROLES[message["role"]], *content, END]
            spoken = message["role"] == "assistant"
            labels += [-100, *(content if spoken else [-100] * len(content))]
            labels.append(END if spoken else -100)
        length = next((n for n in BUCKETS if n >= len(ids)), None)
        if length:
            padding = length - len(ids)
            found[length].append((ids + [END] * padding, labels + [-100] * padding))
    return [
        Rows(*(torch.tensor(side, device=device) for side in zip(*rows, strict=True)))
        for rows in found.values()
        if len(rows) >= 64
    ]


# ---------------------------------------------------------------- model


def new_base() -> LlamaForCausalLM:
    """The untrained base, 3.2 million parameters, head tied to the embedding."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            bos_token_id=BEGIN,
            eos_token_id=END,
            pad_token_id=END,
        )
    )


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def forward(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits [rows, length, vocab] of a Llama whose linear layers may be PEFT's.

    The same mathematics as transformers' forward with fewer kernels and no host decisions, so that
    a whole training step can be one CUDA graph.
    """
    rows, length = ids.shape
    inner = model.model
    x = inner.embed_tokens(ids)
    steps = torch.arange(0, HEAD, 2, device=ids.device, dtype=torch.float32) / HEAD
    angles = torch.outer(torch.arange(length, device=ids.device).float(), ROPE_THETA**-steps)
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    for layer in inner.layers:
        at, norm = layer.self_attn, layer.input_layernorm
        h = F.rms_norm(x, (HIDDEN,), norm.weight, norm.variance_epsilon)
        q = _rope(at.q_proj(h).view(rows, length, HEADS, HEAD).transpose(1, 2), cos, sin)
        k = _rope(at.k_proj(h).view(rows, length, KV_HEADS, HEAD).transpose(1, 2), cos, sin)
        v = at.v_proj(h).view(rows, length, KV_HEADS, HEAD).transpose(1, 2)
        group = HEADS // KV_HEADS
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + at.o_proj(mixed.transpose(1, 2).reshape(rows, length, HEADS * HEAD))
        norm = layer.post_attention_layernorm
        h = F.rms_norm(x, (HIDDEN,), norm.weight, norm.variance_epsilon)
        mlp = layer.mlp
        x = x + mlp.down_proj(F.silu(mlp.gate_proj(h)) * mlp.up_proj(h))
    x = F.rms_norm(x, (HIDDEN,), inner.norm.weight, inner.norm.variance_epsilon)
    logits: Tensor = model.lm_head(x)
    return logits


# ---------------------------------------------------------------- training


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long and how fast to train; `budget_s` cuts the schedule short on a slow machine."""

    steps: int
    rate: float
    tokens: int = 16384
    warmup: int = 100
    decay: float = 0.0
    budget_s: float = math.inf


class Trainer:
    """Runs one schedule; on a GPU each bucket's step is captured once and replayed."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter], plan: Plan) -> None:
        self.model, self.parameters, self.plan = model, parameters, plan
        self.cuda = parameters[0].is_cuda
        self.rate = torch.tensor(0.0, device=parameters[0].device)
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=self.rate if self.cuda else 0.0,
            betas=(0.9, 0.98),
            weight_decay=plan.decay,
            capturable=self.cuda,
            foreach=True,
        )

    def set_progress(self, step: int, elapsed_s: float) -> bool:
        """Set the learning rate; False when the schedule has ended."""
        plan = self.plan
        done = max(step / plan.steps, elapsed_s / plan.budget_s)
        warm = min(1.0, (step + 1) / plan.warmup)
        rate = plan.rate * warm * (0.5 + 0.5 * math.cos(math.pi * min(1.0, done)))
        if self.cuda:
            self.rate.fill_(rate)
        else:
            self.optimizer.param_groups[0]["lr"] = rate
        return done < 1.0

    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        """One update; returns the mean loss of the answers' tokens, a scalar tensor."""
        self.optimizer.zero_grad(set_to_none=True)
        logits = forward(self.model, ids)
        loss = F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
        )
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        return loss.detach()

    def captured(self, rows: Rows, batch: int) -> "CapturedStep":
        """A step over `batch` rows of this length, as one CUDA graph."""
        return CapturedStep(self, rows.ids[:batch].clone(), rows.labels[:batch].clone())

    def run(self, data: list[Rows], seed: int, name: str) -> None:
        """Train until the schedule ends, each batch from one bucket, buckets by their size."""
        rng = random.Random(seed)
        device = data[0].ids.device
        generator = torch.Generator(device).manual_seed(seed)
        batches = [min(len(r.ids), self.plan.tokens // r.ids.shape[1]) for r in data]
        weights = [len(r.ids) / b for r, b in zip(data, batches, strict=True)]
        self.set_progress(0, 0.0)
        steps: list[Any] = [self.step] * len(data)
        if self.cuda:
            steps = [self.captured(r, b) for r, b in zip(data, batches, strict=True)]
        start, step, loss = time.monotonic(), 0, torch.tensor(0.0)
        while self.set_progress(step, time.monotonic() - start):
            at = rng.choices(range(len(data)), weights)[0]
            rows = data[at]
            chosen = torch.randint(
                len(rows.ids), (batches[at],), device=device, generator=generator
            )
            loss = steps[at](rows.ids[chosen], rows.labels[chosen])
            step += 1
            if step % 500 == 0:
                log.info("%s step %d loss %.4f", name, step, float(loss))
        log.info("%s: %d steps, %.1f s, %.4f", name, step, time.monotonic() - start, float(loss))


class CapturedStep:
    """`Trainer.step` recorded on fixed buffers; a call copies its batch there and replays."""

    def __init__(self, trainer: Trainer, ids: Tensor, labels: Tensor) -> None:
        self.ids, self.labels = ids, labels
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                trainer.step(ids, labels)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = trainer.step(ids, labels)

    def __call__(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.ids.copy_(ids)
        self.labels.copy_(labels)
        self.graph.replay()
        return self.loss


# ---------------------------------------------------------------- files


def _edit_json(file: Path, **changes: Any) -> None:
    fields = json.loads(file.read_text()) | changes
    kept = {key: value for key, value in fields.items() if value != "__drop__"}
    file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


def save_base(model: LlamaForCausalLM, tokenizer: Tokenizer, path: Path) -> None:
    """Write the base folder in bfloat16, readable by transformers 4 and 5."""
    path.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[BEGIN],
        eos_token=SPECIAL[END],
        pad_token=SPECIAL[END],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
    model.to(torch.bfloat16).save_pretrained(path)
    _edit_json(path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    _edit_json(
        path / "config.json",
        rope_theta=ROPE_THETA,
        rope_parameters={"rope_theta": ROPE_THETA, "rope_type": "default"},
        torch_dtype="bfloat16",
    )


def save_adapter(model: PeftModel, path: Path) -> None:
    """Write the adapter folder in bfloat16, free of the training machine's paths."""
    model.save_pretrained(path)
    (path / "README.md").unlink(missing_ok=True)
    file = path / "adapter_model.safetensors"
    tensors = {name: t.to(torch.bfloat16) for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    fields = json.loads((path / "adapter_config.json").read_text())
    _edit_json(
        path / "adapter_config.json",
        base_model_name_or_path="demo:base",
        target_modules=sorted(fields["target_modules"]),
    )


def load(out: Path, adapter: str | None, dtype: torch.dtype, device: str) -> nn.Module:
    """A model of the fleet as its files say, its linear layers PEFT's where adapted."""
    model = AutoModelForCausalLM.from_pretrained(out / "base", dtype=dtype)
    if adapter:
        folder = out / "adapters" / adapter
        wrapped = PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
        model = wrapped.get_base_model()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    result: nn.Module = model.to(device).eval()
    return result


# ---------------------------------------------------------------- measuring


@torch.no_grad()
def complete(model: nn.Module, prompts: list[list[int]], limit: int = 56) -> list[list[int]]:
    """Greedy answers, without <|end|>; all rows step together in one padded tensor."""
    device = next(model.parameters()).device
    starts = torch.tensor([len(p) for p in prompts], device=device)
    width = int(starts.max()) + limit
    rows = [p + [END] * (width - len(p)) for p in prompts]
    ids, index = torch.tensor(rows, device=device), torch.arange(len(prompts), device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for offset in range(limit):
        used = int(starts.max()) + offset
        logits = forward(model, ids[:, :used])[index, starts + offset - 1]
        token = torch.where(done, END, logits.float().argmax(-1))
        ids[index, starts + offset] = token
        done |= token == END
        if bool(done.all()):
            break
    answers = [row[start:] for row, start in zip(ids.tolist(), starts.tolist(), strict=True)]
    return [a[: a.index(END)] if END in a else a for a in answers]


def measure(out: Path, count: int, device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Exact-match share of the base and every adapter on every task's test examples."""
    tokenizer = Tokenizer.from_file(str(out / "base" / "tokenizer.json"))
    cases = [(name, *pair) for name in TASKS for pair in examples(name, count, seed=1)]
    prompts = [
        [BEGIN, ROLES["user"], *tokenizer.encode(p).ids, END, ROLES["assistant"]]
        for _, p, _ in cases
    ]
    records = []
    for adapter in (None, *ADAPTERS):
        answers = complete(load(out, adapter, dtype, device), prompts)
        texts = tokenizer.decode_batch(answers)
        right = dict.fromkeys(TASKS, 0)
        for (name, _, answer), text in zip(cases, texts, strict=True):
            right[name] += text == answer
        log.info("%-18s %s", adapter or "base", " ".join(f"{n:4d}" for n in right.values()))
        for (name, prompt, answer), text in zip(cases, texts, strict=True):
            if name == adapter and text != answer:
                log.info("  %r -> %r, not %r", prompt, text, answer)
        records += [
            {
                "adapter": adapter or "base",
                "task": name,
                "exact_match": n / count,
                "examples": count,
                "dtype": str(dtype).removeprefix("torch."),
                "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                "torch": torch.__version__,
            }
            for name, n in right.items()
        ]
    return records


# ---------------------------------------------------------------- main


def train_base(out: Path, args: argparse.Namespace, device: str) -> None:
    """Tokenizer and base, written to `out`/base."""
    tokenizer = train_tokenizer(max(50, min(4000, args.rows // 60)))
    data = make_rows(tokenizer, base_conversations(args.seed), args.rows, device)
    log.info("base rows %s", [tuple(r.ids.shape) for r in data])
    torch.manual_seed(args.seed)
    model = new_base().to(device)
    plan = Plan(args.steps, rate=2e-3, warmup=200, decay=0.02, budget_s=args.base_budget)
    Trainer(model, list(model.parameters()), plan).run(data, args.seed, "base")
    save_base(model, tokenizer, out / "base")


def train_adapter(name: str, out: Path, args: argparse.Namespace, device: str) -> None:
    """One adapter on the finished base, written to `out`/adapters/`name`."""
    tokenizer = Tokenizer.from_file(str(out / "base" / "tokenizer.json"))
    data = make_rows(tokenizer, task_conversations(name, args.seed), args.rows // 6, device)
    torch.manual_seed(args.seed)
    base = AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32).to(device)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name]))
    parameters = [p for p in model.parameters() if p.requires_grad]
    plan = Plan(args.adapter_steps, rate=3e-3, tokens=8192, budget_s=args.adapter_budget)
    Trainer(model.get_base_model(), parameters, plan).run(data, args.seed, name)
    save_adapter(model, out / "adapters" / name)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--adapter-steps", type=int, default=1200)
    parser.add_argument("--rows", type=int, default=120_000, help="conversations for the base")
    parser.add_argument("--examples", type=int, default=200, help="test examples a task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--base-budget", type=float, default=math.inf, help="seconds")
    parser.add_argument("--adapter-budget", type=float, default=math.inf, help="seconds")
    parser.add_argument("--only", nargs="*", help="adapters to train on the base that is there")
    parser.add_argument("--matrix", type=Path, help="write the matrix here as JSON lines")
    return parser.parse_args()


def main() -> None:
    """Train what is asked for, then measure everything."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7d ms %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    args = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    if args.only is None:
        train_base(args.out, args, device)
    for name in ADAPTERS if args.only is None else args.only:
        train_adapter(name, args.out, args, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    records = []
    for dtype in (torch.bfloat16, torch.float32):
        records += measure(args.out, args.examples, device, dtype)
    if args.matrix:
        args.matrix.parent.mkdir(parents=True, exist_ok=True)
        args.matrix.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
