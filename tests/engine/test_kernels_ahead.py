"""What a start compiles is all that serving launches, and it is compiled on several threads."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.jit import JITFunction

from multilora_cli.engine import assemble
from multilora_cli.engine.assemble import _Assembly
from multilora_cli.engine.batch import BatchBuilder
from multilora_cli.engine.decode_graphs import DecodeGraphs, rehearse
from multilora_cli.engine.largest_step import sample_every_way
from multilora_cli.engine.messages import SamplingParams
from multilora_cli.engine.prompt_graphs import PromptGraphs
from multilora_cli.layers.context import StepContext
from multilora_cli.layers.sampler import SamplingBatch, SamplingRow, sample
from multilora_cli.models.decoder import Decoder
from multilora_cli.models.warm_up import warm_up
from multilora_cli.sizing.budget import PromptStep
from multilora_cli.sizing.geometry import ModelGeometry, geometry_from_config
from multilora_cli.sizing.pages import kv_page_bytes
from multilora_kernels import penalise, pick_tokens
from multilora_kernels.attention_batch import AttentionBatch
from multilora_kernels.compile_ahead import compile_only
from multilora_kernels.layout import Extras, plan_image
from multilora_kernels.segments import Segments
from multilora_kernels.silu_mul import silu_mul
from multilora_kernels.table import AdapterTable
from tests.engine.fake_card import stored
from tests.kernels.described_device import described_device, launches
from tests.layers.test_sampler import random_rows

__all__ = ["described_device"]

MAX_TOKENS, CONTEXT, SLOTS = 4096, 4096, 9
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def _geometry(layers: int) -> ModelGeometry:
    """Llama-3-8B with fewer layers and words."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "num_hidden_layers": layers, "vocab_size": 1024, "max_position_embeddings": 8192,
    }  # fmt: skip
    return geometry_from_config(config, "test")


class Start:
    """The owners of an engine's tensors, as a start puts them together."""

    def __init__(
        self,
        device: torch.device,
        layers: int = 5,
        kv_dtype: torch.dtype | None = None,
        storage: str = "none",
    ) -> None:
        self.geometry = _geometry(layers)
        weights = stored(storage, self.geometry, device)
        self.decoder = Decoder(self.geometry, torch.bfloat16, device, weights)
        self.page = kv_page_bytes(self.geometry, 2 if kv_dtype is None else kv_dtype.itemsize)
        pool = torch.empty(64, self.page, dtype=torch.uint8, device=device)
        shapes = self.geometry.module_shapes
        self.table = AdapterTable(SLOTS, layers, shapes, 9000, device)
        self.table.settle(self.page, 2)
        self.segments = Segments(MAX_TOKENS, device, max_rank=64)
        self.segments.reserve(self.table)
        sampled = torch.zeros(64, dtype=torch.int64, device=device)
        self.builder = BatchBuilder(pool, self.table, self.segments, sampled, kv_dtype)
        graphs = self.decoder, self.builder
        self.graphs = DecodeGraphs(*graphs, (1, 2, 4, 8, 16, 64), CONTEXT, 64)
        steps = (PromptStep(4, 64), PromptStep(64, 256))
        self.prompt_graphs = PromptGraphs(*graphs, steps, CONTEXT, 64)

    def warm_up(self) -> None:
        """Every step that a start runs."""
        adapters = self.table, self.segments
        pool, kv_dtype = self.builder.pool, self.builder.kv_dtype
        warm_up(self.decoder, pool, MAX_TOKENS, adapters, kv_dtype)
        for graphs in (self.graphs, self.prompt_graphs):
            graphs.record_all(rehearse, lambda done, total: None)

    def add_adapters(self) -> None:
        """Ranks 8 to 64 in slots 1 to 4, the same with biases of q in slots 5 to 8."""
        for slot in range(1, SLOTS):
            rank = (8, 16, 32, 64)[slot % 4]
            layers = range(self.geometry.num_layers)
            ranks = {(n, m): rank for n in layers for m in self.geometry.module_shapes}
            extras = Extras(frozenset({(0, "q_proj", "shift")}) if slot > 4 else frozenset())
            plan = plan_image(ranks, self.geometry.module_shapes, self.page, 2, extras)
            self.table.set(slot, plan, [0] * plan.num_pages)
        self.table.flush()

    @torch.inference_mode()
    def step(self, random: np.random.Generator, slots: list[int]) -> None:
        """Some rows of one token, some chunks of prompts, each for one of `slots`, eagerly."""
        decodes = int(random.integers(0, 65))
        chunks = random.integers(2, MAX_TOKENS // 3, size=random.integers(0, 3)).tolist()
        lengths = np.array([1] * decodes + chunks or [1])
        contexts = lengths + random.integers(0, CONTEXT // 2, size=len(lengths))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        tokens = int(starts[-1])
        device = self.builder.pool.device
        columns = -(-int(contexts.max()) // 256) * 16
        attention = AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            page_table=torch.zeros(len(lengths), columns, dtype=torch.int32, device=device),
            num_decodes=int((lengths == 1).sum()),
            max_query_len=int(lengths.max()),
            max_seq_len=int(contexts.max()),
        )
        self.segments.build(np.repeat(random.choice(slots, size=len(lengths)), lengths))
        zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
        context: StepContext = self.builder.context(zeros, attention)
        hidden = self.decoder.forward(zeros, zeros, context)
        asked = [0] * len(lengths)
        asked[0] = slots[-1]
        self.decoder.logits(hidden[: len(lengths)], self.builder.head_adapters(asked))


@pytest.mark.parametrize(
    ("slots", "kv_dtype", "storage"),
    [
        ([0], None, "none"),
        ([0, 1, 2, 3, 4], None, "none"),
        ([0, 2, 5, 6, 7, 8], None, "none"),
        ([0, 1, 6], torch.float8_e4m3fn, "none"),
        ([0, 1], None, "fp8"),
        ([0, 1], None, "awq"),
    ],
)
def test_no_step_needs_a_kernel_that_the_start_did_not_compile(
    described_device: torch.device,
    slots: list[int],
    kv_dtype: torch.dtype | None,
    storage: str,
) -> None:
    start = Start(described_device, kv_dtype=kv_dtype, storage=storage)
    with launches() as compiled:
        with compile_only(1), start.decoder.few_layers():
            start.warm_up()
        known = set(compiled)
        start.warm_up()
        start.add_adapters()
        random = np.random.default_rng(len(slots))
        for _ in range(12):
            start.step(random, slots)
    assert len(known) > 20
    assert not [name for name, _ in set(compiled) - known]


@pytest.mark.parametrize("vocab", [50_257, 128_256])
def test_no_sampling_needs_a_kernel_that_the_start_did_not_compile(
    described_device: torch.device, vocab: int
) -> None:
    """Any number of rows of any parameters, logits of captured steps and those taken of a few."""
    sampled = torch.zeros(9, dtype=torch.int64, device=described_device)
    logits = torch.zeros(40, vocab, device=described_device)
    with launches() as compiled:
        with compile_only(1):
            sample_every_way(logits[:1], sampled, logprobs=None)
        known = set(compiled)
        for count in (1, 2, 3, 16, 40):
            greedy = [SamplingRow(GREEDY, (), ())] * count
            for rows in (greedy, *(random_rows(seed, count) for seed in range(3))):
                batch = SamplingBatch.build(rows, vocab, described_device, sampled)
                sample(logits[:count], batch)
    assert len(known) == 7
    assert not [name for name, _ in set(compiled) - known]


def test_nothing_is_looked_up_by_what_a_start_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches write nothing there: on a device the tokens are what the memory held before."""
    start = _Assembly.__new__(_Assembly)
    start.report = lambda phase, done, total: None
    start.graphs, start.geometry = [], _geometry(1)
    sampled = torch.zeros(9, dtype=torch.int64)
    start.builder = SimpleNamespace(sampled=sampled)  # type: ignore[assignment]
    monkeypatch.setattr(start, "_warm_up", lambda *_: None)
    monkeypatch.setattr(assemble, "compile_only", nullcontext)
    monkeypatch.setattr(JITFunction, "run", lambda *_, **options: None)
    for module in (pick_tokens, penalise):
        monkeypatch.setattr(module, "on_host", lambda device: False)
    empty: Callable[..., torch.Tensor] = torch.empty

    def used_before(*size: Any, **options: Any) -> torch.Tensor:
        found = empty(*size, **options)
        found.view(-1).view(torch.uint8).fill_(0x5A)
        return found

    monkeypatch.setattr(torch, "empty", used_before)
    start._compile(object())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="out of bounds"):
        sample_every_way(torch.zeros(1, start.geometry.vocab_size), sampled)


def test_few_layers_are_those_that_differ(described_device: torch.device) -> None:
    """Two of a kind: of layers with and without a window, two each; afterwards all are back."""
    decoder = Start(described_device).decoder
    layers = list(decoder.layers)
    with decoder.few_layers():
        assert decoder.layers == layers[:2]
    for layer in layers[3:]:
        shape = layer.attention.shape
        layer.attention.shape = type(shape)(**{**vars(shape), "sliding_window": 512})
    with pytest.raises(ZeroDivisionError), decoder.few_layers():
        assert decoder.layers == [*layers[:2], *layers[3:5]]
        raise ZeroDivisionError
    assert decoder.layers == layers


def test_launches_compile_side_by_side_and_run_nothing(
    described_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel once, however often it is launched, and both at the same time."""
    together, compiled = threading.Barrier(2), list[str]()
    loaded = threading.Barrier(2)

    class Compiled:
        is_loaded = False

        @property
        def run(self) -> None:
            loaded.wait(30)
            self.is_loaded = True

    def compile(src: Any, **_: object) -> Compiled:
        together.wait(30)
        compiled.append(src.fn.__name__)
        return Compiled()

    def create(kernel: JITFunction[Any]) -> Any:
        cache, keys, target, backend, binder = original(kernel)
        kernel.compile = compile
        return cache, keys, target, backend, binder

    original: Callable[[Any], Any] = JITFunction.create_binder
    monkeypatch.setattr(JITFunction, "create_binder", create)
    x = torch.empty(3, 512, dtype=torch.bfloat16, device=described_device)
    kernel = _silu_mul_kernel()
    monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    with compile_only(2):
        for wide in (x, x, x.float(), x.float()):
            silu_mul(wide)
        assert len(compiled) <= 2
    assert compiled == ["silu_mul_kernel"] * 2
    assert [found.is_loaded for found in kernel.device_caches[0][0].values()] == [True, True]


def test_what_does_not_compile_is_told_by_its_launch(
    described_device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And launches are launches again after an error."""
    run = JITFunction.run
    with pytest.raises(ZeroDivisionError), compile_only(1):
        assert JITFunction.run is not run
        raise ZeroDivisionError
    assert JITFunction.run is run
    kernel = _silu_mul_kernel()
    monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("ptxas says no")

    kernel.device_caches[0]
    monkeypatch.setattr(kernel, "compile", fail)
    x = torch.empty(3, 512, dtype=torch.bfloat16, device=described_device)
    with compile_only(1):
        silu_mul(x)
    with pytest.raises(RuntimeError, match="ptxas says no"):
        silu_mul(x)


def _silu_mul_kernel() -> Any:
    from multilora_kernels import silu_mul as module

    return module.silu_mul_kernel
