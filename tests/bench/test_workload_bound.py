"""Bounds of whole loads against the table computed for Punica's text generation."""

import pytest

from multilora_cli.bench.bound import Costs, arrival_bound, step_reads, workload_bound
from multilora_cli.bench.workload import BenchRequest, SLora, punica_trace, slora_trace
from multilora_cli.sizing.budget import base_bytes
from multilora_cli.sizing.geometry import geometry_from_config
from multilora_cli.sizing.hardware import find_gpu
from multilora_cli.sizing.pages import TARGETS, adapter_cost, kv_page_bytes, uniform_ranks

LLAMA3_8B = geometry_from_config(
    {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    },
    "config.json",
)  # fmt: skip


def costs() -> Costs:
    ranks = uniform_ranks(LLAMA3_8B, 16, TARGETS["all"])
    cost = adapter_cost(LLAMA3_8B, ranks, kv_page_bytes(LLAMA3_8B, 2), 2)
    return Costs(
        gpu=find_gpu("h200"),
        geometry=LLAMA3_8B,
        base=base_bytes(LLAMA3_8B, 2),
        kv_itemsize=2,
        max_num_seqs=256,
        adapter_bytes=dict.fromkeys(range(1024), cost.weight_bytes),
    )


@pytest.mark.parametrize(
    ("popularity", "tokens_per_s"),
    [("distinct", 6692), ("uniform", 7017), ("skewed", 7407), ("identical", 7660)],
)
def test_punicas_set_on_an_h200(popularity: str, tokens_per_s: float) -> None:
    """The published column is decode alone, with 32 rows in every step: at the end fewer run,
    which takes 2.7 % more steps. Prefill of these prompts is 1 % of it."""
    trace = punica_trace(popularity)
    bound = workload_bound(trace, 32, costs())
    tokens = sum(request.output_tokens for request in trace)
    assert tokens / bound.decode_s == pytest.approx(tokens_per_s, rel=0.03)
    assert bound.batch == 32 and 0 < bound.prefill_s < 0.02 * bound.decode_s
    assert bound.output_tokens_per_s == pytest.approx(tokens / bound.seconds)


def test_a_step_reads_every_adapter_of_its_rows_once() -> None:
    def reads(*requests: tuple[int | None, int], batch: int) -> tuple[int, int]:
        load = [BenchRequest(adapter, 1, output) for adapter, output in requests]
        return step_reads(load, batch, {0: 10, 1: 100})

    assert reads((0, 5), (1, 5), batch=2) == (5, 550)
    assert reads((0, 5), (0, 5), batch=2) == (5, 50)
    assert reads((None, 5), (0, 5), batch=2) == (5, 50)
    assert reads((0, 5), (1, 2), batch=2) == (5, 5 * 10 + 2 * 100)  # one runs on alone
    assert reads((0, 5), (1, 2), batch=1) == (7, 5 * 10 + 2 * 100)
    # The third takes the place of the second after two steps and ends with the seventh.
    assert reads((0, 5), (1, 2), (0, 5), batch=2) == (7, 7 * 10 + 2 * 100)
    assert reads((7, 3), batch=4) == (3, 0)  # of whom nobody knows the size


def test_the_tail_of_a_short_load_is_counted() -> None:
    """128 of Punica's requests, 32 at a time: 4,911 steps, where full ones would be 3,873."""
    trace = punica_trace("distinct", 128)
    assert step_reads(trace, 32, {})[0] == 4911
    assert sum(request.output_tokens for request in trace) == 32 * 3873


def test_arrivals_that_are_all_at_once_have_the_bound_of_the_schedule() -> None:
    trace = punica_trace("skewed", 64)
    summed, stepped = workload_bound(trace, 16, costs()), arrival_bound(trace, 16, costs())
    assert stepped.decode_s == pytest.approx(summed.decode_s, rel=1e-9)
    assert stepped.prefill_s == pytest.approx(summed.prefill_s, rel=1e-9)
    assert stepped.output_tokens_per_s == pytest.approx(summed.output_tokens_per_s, rel=1e-9)
    assert (stepped.batch, summed.batch) == (16, 16)


def test_where_requests_are_rare_their_arrivals_decide() -> None:
    """One a second, each done long before the next: the last one's time is all there is."""
    rare = [BenchRequest(0, 100, 50, float(second)) for second in range(10)]
    found = arrival_bound(rare, None, costs())
    alone = arrival_bound(rare[:1], None, costs())
    assert found.batch == 1 and found.seconds == pytest.approx(10 * alone.seconds)
    assert found.output_tokens_per_s == pytest.approx(500 / (9 + alone.seconds))
    assert arrival_bound(rare, None, costs(), 4.9).output_tokens_per_s == pytest.approx(250 / 4.9)


def test_what_can_be_answered_by_a_time() -> None:
    """S-LoRA's trace at 10 requests/s, 12 s of it: the card keeps up, and some answers run."""
    trace = slora_trace(SLora(1000, rate=10.0, duration_s=120.0))
    found = arrival_bound(trace, None, costs(), 12.0)
    sent = sum(r.output_tokens for r in trace if r.arrival_s < 12.0)
    assert 0.8 * sent < found.output_tokens_per_s * 12.0 < sent
    assert 2 <= found.batch < 40
    assert arrival_bound([], None, costs()).output_tokens_per_s == 0.0


def test_the_batch_is_what_is_at_once_and_what_the_engine_takes() -> None:
    load = [BenchRequest(None, 8, 8)] * 400
    assert workload_bound(load, None, costs()).batch == 256
    assert workload_bound(load, 16, costs()).batch == 16
    assert workload_bound(load[:4], 16, costs()).batch == 4
