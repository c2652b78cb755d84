"""What the POST routes accept, field by field; the published schemas are made from these.

Types and limits are checked while the bytes are parsed, before anything is copied or counted.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_MESSAGES = 2048
MAX_PARTS = 64
MAX_CHOICES = 8
MAX_PROMPTS = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_IDS = 64

Name = Annotated[str, Meta(max_length=512)]
Flag = bool | None
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Source = Annotated[str, Meta(min_length=1, max_length=4096)]
Seconds = Annotated[float, Meta(gt=0, le=1e8)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries beside the text."""

    include_usage: Flag = None  # one last chunk without choices, with usage
    continuous_usage_stats: Flag = None  # usage so far in every chunk
    include_obfuscation: Flag = None  # accepted; nothing is padded


class LoraRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TensorRT-LLM's way to name an adapter."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=512)]
    lora_int_id: int | None = None
    lora_path: Name | None = None


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message; only text is served."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Meta(min_length=1, max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    reasoning_content: str | None = None  # passed to the template as it is
    # Fields of replies that clients send back; they must be empty, since tools are not served.
    refusal: str | None = None
    annotations: Annotated[list[msgspec.Raw], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[msgspec.Raw], Meta(max_length=0)] | None = None


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chat and text completions share."""

    model: (
        Annotated[str, Meta(description="Adapter name, base name, or `base:adapter`.")] | None
    ) = None
    lora_path: Annotated[str, Meta(description="Name of a registered adapter.")] | None = None
    adapter_id: Name | None = None
    adapter: Name | None = None
    lora_request: LoraRequest | None = None

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2, description="0 is greedy.")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31, description="-1 and 0: off.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)
        ]
        | None
    ) = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: Flag = None
    ignore_eos: Flag = None
    skip_special_tokens: Flag = None
    add_special_tokens: Flag = None
    stream: Flag = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: (
        Annotated[
            int,
            Meta(ge=-1, lt=2**31, description="Keep this many, the last; -1: what fits."),
        ]
        | None
    ) = None
    return_token_ids: Flag = None
    return_tokens_as_token_ids: Annotated[bool, Meta(description="Of logprobs.")] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class ChatBody(Generate, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    max_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                lt=2**31,
                description="Default: what the context leaves. More than it leaves is cut to it.",
            ),
        ]
        | None
    ) = None
    logprobs: Flag = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: Flag = None
    continue_final_message: (
        Annotated[bool, Meta(description="Go on with the last message, not after it.")] | None
    ) = None
    chat_template_kwargs: (
        Annotated[
            dict[
                Annotated[str, Meta(pattern=r"\A[a-z_]{1,64}\Z")],
                bool | int | float | Annotated[str, Meta(max_length=256)] | None,
            ],
            Meta(max_length=16, description="Only variables that the base's template reads."),
        ]
        | None
    ) = None
    reasoning_effort: Annotated[str, Meta(pattern=r"\A[a-z]{1,16}\Z")] | None = None


class CompletionBody(Generate, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: (
        str | Annotated[list[str | int | list[int]], Meta(min_length=1, max_length=2**20)] | None
    ) = None
    max_tokens: (
        Annotated[
            int, Meta(ge=0, lt=2**31, description="Default 16. 0 needs `echo`. Cut to the context.")
        ]
        | None
    ) = None
    echo: Flag = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/load_lora_adapter, as in vLLM."""

    lora_name: str | None = None
    lora_path: Annotated[str, Meta(max_length=4096)] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    pinned: Annotated[bool, Meta(description="Keep it on the device.")] = False
    expected_generation: (
        Annotated[int, Meta(ge=0, description="With load_inplace: refuse if another one is.")]
        | None
    ) = None


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/unload_lora_adapter, as in vLLM."""

    lora_name: str | None = None
    lora_int_id: int | None = None
    expected_generation: Annotated[int, Meta(ge=0)] | None = None


class WarmBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/adapters/{name}/warm."""

    hot: Annotated[bool, Meta(description="To the device, not only to host memory.")] = False
    pin: Annotated[bool, Meta(description="Keep it there.")] = False
    ttl: Annotated[
        float | Annotated[str, Meta(max_length=32)] | None,
        Meta(description="Unpin it and take it back to cold once it was unused that long: 1h."),
    ] = None


class EvictBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/adapters/{name}/evict."""

    cold: Annotated[bool, Meta(description="Out of host memory too.")] = False
    unpin: Annotated[bool, Meta(description="Also where it is pinned.")] = False


TemplateOwner = Annotated[
    str, Meta(max_length=4096, pattern=r"\A(base|adapter|/[^\x00-\x1f\x7f]+\.(jinja|j2))\Z")
]


class FleetAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter as a fleet file declares it; folders are absolute."""

    name: Annotated[str, Meta(max_length=257)]
    source: Source
    pin: Literal["hot", "warm"] | None = None
    ttl: Seconds | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    digest: Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")] | None = None
    tokenizer: Literal["base", "adapter"] | None = None
    chat_template: TemplateOwner | None = None


class FleetPattern(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name pattern as a fleet file declares it; folders are absolute."""

    pattern: Annotated[str, Meta(max_length=300)]
    source: Source
    ttl: Seconds | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0


class FleetBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/fleet: a whole fleet file, expanded, as `mlora apply` sends it."""

    settings: Annotated[
        dict[str, Any], Meta(description="All but the adapters: cannot change while it runs.")
    ]
    adapters: Annotated[list[FleetAdapter], Meta(max_length=50_000)]
    patterns: Annotated[list[FleetPattern], Meta(max_length=1000)]
    dry_run: Annotated[bool, Meta(description="Say what would change, and change nothing.")] = False


class SageMakerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /adapters: the load call as SageMaker's clients make it."""

    name: str | None = None
    src: Annotated[str, Meta(max_length=4096)] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: Flag = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=2**20)] | None = None


# Fields that other clients send and that change nothing here.
HARMLESS = frozenset(
    {
        "include_reasoning", "metadata", "parallel_tool_calls",
        "prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier",
        "service_tier", "spaces_between_special_tokens", "store", "user",
    }
)  # fmt: skip

# Fields that would change the answer: accepted only with a value that asks for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "adapter_source": ("local",),
    "allowed_token_ids": (),
    "api_token": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_content_format": ("auto", "string"),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": (),
    "web_search_options": (),
}
