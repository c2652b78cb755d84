"""Stand-ins that need neither torch nor a model: an engine with scripted tokens, a byte tokenizer,
tiny adapter folders and a registry over them.

The fake engine speaks the real messages. What it says is decided by the prompt: after `say:` it
says the rest of the line, after `ids:` those token ids; without a script it repeats the signature
of the adapter version that the request was admitted with, `<name#generation>`, for ever.
"""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from multilora_cli.engine.messages import (
    Abort,
    AdapterEvent,
    AdapterRef,
    AdapterStatus,
    Delta,
    Drain,
    EvictAdapter,
    Fault,
    FromEngine,
    LoadAdapter,
    Query,
    Ready,
    Reply,
    Snapshot,
    StartFailed,
    Step,
    Submit,
    ToEngine,
    TokenLogprobs,
)

if TYPE_CHECKING:  # an engine process starts faster without them
    from multilora_cli.adapters.registry import Registry
    from multilora_cli.server.config import ServerConfig
    from multilora_cli.sizing.geometry import ModelGeometry

VOCAB = 384
BOS, EOS, TURN, END_TURN = 256, 257, 258, 259
TEMPLATE = (
    "{% for m in messages %}{{ '<turn>' + m['role'] + '\\n' + m['content'] + '<end>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>assistant\\n' }}{% endif %}"
)


# ---- files


def byte_tokenizer(folder: Path, *, template: str | None = TEMPLATE, add_bos: bool = True) -> Path:
    """F3 of the case list: one token a byte, `<s>`, `</s>`, `<turn>` and `<end>` special."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    specials = {"<s>": BOS, "</s>": EOS, "<turn>": TURN, "<end>": END_TURN}
    vocab |= specials
    vocab |= {f"<u{i}>": i for i in range(len(vocab), VOCAB)}
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for text, i in specials.items()
    ]  # fmt: skip
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    tokenizer = {"version": "1.0", "added_tokens": added, "model": model, "decoder": decoder}
    if add_bos:
        parts = [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        bos = {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": bos,
        }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def own_tokenizer(folder: Path, *, template: str | None = "own:{{ messages[-1].content }}") -> Path:
    """The byte tokenizer with a and b in each other's place, one more token in a spare row, and
    `<end>` as its end."""
    byte_tokenizer(folder, template=template, add_bos=False)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["<0x61>"], vocab["<0x62>"] = vocab["<0x62>"], vocab["<0x61>"]
    del vocab[f"<u{VOCAB - 1}>"]
    tokenizer["added_tokens"].append(
        tokenizer["added_tokens"][0] | {"id": VOCAB - 1, "content": "<note>"}
    )
    path.write_text(json.dumps(tokenizer))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "<end>"}))
    return folder


def tiny_geometry(folder: Path) -> "ModelGeometry":
    """A two-layer Llama of 32 channels, from a config.json written into `folder`."""
    from multilora_cli.sizing.geometry import read_geometry

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": VOCAB, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "eos_token_id": EOS, "bos_token_id": BOS, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return read_geometry(folder)


def write_adapter(folder: Path, *, seed: int = 0, rank: int = 4, **config: Any) -> Path:
    """A PEFT folder on q_proj and v_proj of `tiny_geometry`."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(2):
        for module, width in (("q_proj", 32), ("v_proj", 16)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_"
            tensors[f"{name}A.weight"] = rng.standard_normal((rank, 32)).astype(np.float32)
            tensors[f"{name}B.weight"] = rng.standard_normal((width, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none",
              "target_modules": ["q_proj", "v_proj"]} | config  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def tiny_registry(folder: Path, names: tuple[str, ...] = ("upper", "acme/legal")) -> "Registry":
    """The real registry over adapters written below `folder`, which is also its root."""
    from multilora_cli.adapters.entry import AdapterRequest, ServedBase
    from multilora_cli.adapters.registry import Registry
    from multilora_cli.text.adapter_text import TextChecker

    geometry = tiny_geometry(folder / "base")
    served = ServedBase(geometry, "demo", check_text=TextChecker(VOCAB))
    registry = Registry(served, relative_to=folder, roots=[folder])
    for seed, name in enumerate(names):
        path = write_adapter(folder / "adapters" / name.replace("/", "-"), seed=seed)
        registry.register(AdapterRequest(name, str(path)))
    return registry


def tiny_config(folder: Path, **changes: Any) -> "ServerConfig":
    """A server configuration over the byte tokenizer."""
    from multilora_cli.server.config import ServerConfig

    values: dict[str, Any] = {
        "base_name": "demo",
        "base_path": byte_tokenizer(folder / "base"),
        "vocab_size": VOCAB,
        "eos_token_ids": (EOS,),
        "base_digest": "b" * 64,
        "port": 0,
    }
    return ServerConfig(**(values | changes))


# ---- the engine


@dataclass(frozen=True)
class Behaviour:
    """What a fake engine does beside answering. Times in seconds."""

    token_s: float = 0.0  # between steps
    max_model_len: int = 512
    start_s: float = 0.0
    start_failed: str | None = None
    dies_after_tokens: int | None = None  # counted over all sequences
    broken: dict[str, str] = field(default_factory=dict)  # adapter name -> fault code
    silent: bool = False  # submits are taken and never answered
    tokens_per_step: int = 1


@dataclass
class _Sequence:
    submit: Submit
    index: int
    script: list[int]
    sent: int = 0


class FakeEngine:
    """The engine's side of a connection."""

    def __init__(self, connection: socket.socket, behaviour: Behaviour) -> None:
        self._socket = connection
        self._behaviour = behaviour
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._buffer = bytearray()
        self._sequences: list[_Sequence] = []
        self._adapters: dict[str, AdapterStatus] = {}
        self._gone: set[str] = set()  # since the last snapshot
        self._tokens = 0
        self._running = True
        self.submits: list[Submit] = []
        self.aborted: list[int] = []
        self.calls: list[ToEngine] = []

    @property
    def num_live(self) -> int:
        """Sequences that are not finished."""
        return len(self._sequences)

    def run(self) -> None:
        """Serve until the connection or the script ends."""
        behaviour = self._behaviour
        time.sleep(behaviour.start_s)
        try:
            if behaviour.start_failed is not None:
                self._send(StartFailed(behaviour.start_failed, exit_code=2))
                return
            self._send(Ready("cpu", "float32", behaviour.max_model_len, 64, 4096, {}, {}))
            while self._running:
                self._turn()
        except OSError:
            pass
        finally:
            self._socket.close()

    def _turn(self) -> None:
        wait_s = self._behaviour.token_s if self._sequences else 0.5
        if select.select([self._socket], [], [], wait_s)[0]:
            data = self._socket.recv(2**16)
            if not data:
                self._running = False
                return
            self._buffer += data
            while (message := self._take()) is not None:
                self._handle(message)
        if self._sequences and not self._behaviour.silent:
            self._step()

    def _take(self) -> ToEngine | None:
        if len(self._buffer) < 4:
            return None
        end = 4 + int.from_bytes(self._buffer[:4], "little")
        if len(self._buffer) < end:
            return None
        message: ToEngine = self._decoder.decode(bytes(self._buffer[4:end]))
        del self._buffer[:end]
        return message

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self.submits.append(message)
            self._admit(message)
        elif isinstance(message, Abort):
            self.aborted.append(message.request_id)
            self._sequences = [
                s for s in self._sequences if s.submit.request_id != message.request_id
            ]
        elif isinstance(message, Drain):
            self._running = False
        else:
            self.calls.append(message)
            self._send(self._answer(message))

    def _answer(self, message: LoadAdapter | EvictAdapter | Query) -> Reply:
        if isinstance(message, LoadAdapter):
            code = self._behaviour.broken.get(message.adapter.name)
            if code is not None:
                return Reply(message.call_id, Fault(code, "lora_A: 3 values are not finite"))
            status = self._use(message.adapter, "hot" if message.hot else "warm")
            return Reply(message.call_id, status=status)
        if isinstance(message, EvictAdapter):
            held = self._adapters.pop(message.digest, None)
            self._gone.add(message.digest)
            pages = held.pages if held else 0
            status = AdapterStatus(message.digest, "stored", 0, 0, 0, False, 0, 0, 0.0)
            return Reply(
                message.call_id, status=status, freed_pages=pages, freed_host_bytes=pages * 4096
            )
        return Reply(message.call_id, snapshot=self._snapshot())

    def _use(self, adapter: AdapterRef, tier: Any) -> AdapterStatus:
        old = self._adapters.get(adapter.digest)
        live = sum(s.submit.adapter == adapter for s in self._sequences)
        status = AdapterStatus(
            adapter.digest, tier, 3, 3 * 4096, live, tier == "hot",
            1, old.hits + 1 if old else 0, 0.0,
        )  # fmt: skip
        self._adapters[adapter.digest] = status
        return status

    def _snapshot(self) -> Snapshot:
        running: dict[str, int] = {}
        gone, self._gone = self._gone - self._adapters.keys(), set()
        for sequence in self._sequences:
            if sequence.submit.adapter is not None:
                digest = sequence.submit.adapter.digest
                running[digest] = running.get(digest, 0) + 1
        return Snapshot(
            0, len(self._sequences), 64, 60, 1, 0, 3, {"steps": float(self._tokens)}, running, {},
            [
                msgspec.structs.replace(status, references=running.get(status.digest, 0))
                for status in self._adapters.values()
            ],
            {"adapter_slot": 2}, {"adapter_slot": 7.5, "place": 0.0}, list(gone),
        )  # fmt: skip

    def _admit(self, submit: Submit) -> None:
        adapter = submit.adapter
        if adapter is not None and adapter.name in self._behaviour.broken:
            code = self._behaviour.broken[adapter.name]
            fault = Fault(code, f"adapter {adapter.name} cannot be had", 3.0)
            indices = range(submit.n)
            self._send(Step([Delta(submit.request_id, i, [], fault=fault) for i in indices]))
            return
        for index in range(submit.n):
            self._sequences.append(_Sequence(submit, index, script_of(submit, index)))
        if adapter is not None:
            was_held = adapter.digest in self._adapters
            status = self._use(adapter, "hot")
            if not was_held:
                self._send(AdapterEvent(status))

    def _step(self) -> None:
        deltas = []
        for sequence in list(self._sequences):
            delta = self._delta(sequence)
            deltas.append(delta)
            self._tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._sequences.remove(sequence)
        self._send(Step(deltas))
        limit = self._behaviour.dies_after_tokens
        if limit is not None and self._tokens >= limit:
            self._running = False

    def _delta(self, sequence: _Sequence) -> Delta:
        submit, params = sequence.submit, sequence.submit.params
        first = sequence.sent == 0
        ids: list[int] = []
        finish: Any = "length" if params.max_tokens == 0 else None
        while finish is None and len(ids) < self._behaviour.tokens_per_step:
            token = sequence.script[sequence.sent % len(sequence.script)]
            ids.append(token)
            sequence.sent += 1
            if token in params.stop_token_ids and sequence.sent > params.min_tokens:
                finish = "stop"
            elif sequence.sent >= params.max_tokens:
                finish = "length"
        prompt = None
        if first and params.prompt_logprobs is not None:
            prompt = [None, *(_logprobs(t, params.prompt_logprobs) for t in submit.prompt[1:])]
        return Delta(
            submit.request_id,
            sequence.index,
            ids,
            logprobs=None
            if params.logprobs is None
            else [_logprobs(token, params.logprobs) for token in ids],
            prompt_logprobs=prompt,
            finish_reason=finish,
            cached_tokens=2 if first else 0,
        )

    def _send(self, message: FromEngine) -> None:
        frame = msgspec.msgpack.encode(message)
        self._socket.sendall(len(frame).to_bytes(4, "little") + frame)


def script_of(submit: Submit, index: int) -> list[int]:
    """The ids that a fake engine says for a request, repeated when they are used up."""
    text = bytes(token if token < 256 else 10 for token in submit.prompt)
    if match := re.search(rb".*ids:([0-9,]+)", text, re.DOTALL):
        return [int(token) for token in match[1].split(b",")]
    if match := re.search(rb".*say:([^\n]*)", text, re.DOTALL):
        return [*match[1], EOS]
    adapter = submit.adapter
    name = f"{adapter.name}#{adapter.generation}" if adapter else "base"
    sample = str(index) if submit.params.temperature > 0 and submit.n > 1 else ""
    return list(f"<{name}{sample}>".encode())


def _logprobs(token: int, num_top: int) -> TokenLogprobs:
    tops = [(token + place) % 256 for place in range(num_top)]
    return TokenLogprobs(token, -0.25, tops, [-0.25 - place for place in range(num_top)])


class ThreadProcess:
    """A fake engine in a thread, seen as a process."""

    def __init__(self, engine: FakeEngine) -> None:
        self._thread = threading.Thread(target=engine.run, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int:
        """Exit status 0, once the thread has ended."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError
        return 0

    def kill(self) -> None:
        """A thread ends with its connection."""


class Spawner:
    """Spawns fake engines in threads; `engines` are all it ever made."""

    def __init__(self, *behaviours: Behaviour) -> None:
        self._behaviours = behaviours or (Behaviour(),)
        self.engines: list[FakeEngine] = []

    def __call__(self) -> tuple[ThreadProcess, socket.socket]:
        """The next engine; the last behaviour is repeated."""
        place = min(len(self.engines), len(self._behaviours) - 1)
        ours, theirs = socket.socketpair()
        engine = FakeEngine(theirs, self._behaviours[place])
        self.engines.append(engine)
        return ThreadProcess(engine), ours

    @property
    def engine(self) -> FakeEngine:
        """The one that was spawned last."""
        return self.engines[-1]


def spawn_process(behaviour: Behaviour) -> Callable[[], tuple[Any, socket.socket]]:
    """Spawns fake engines as real processes, which signals can kill."""

    def spawn() -> tuple[Any, socket.socket]:
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno()), json.dumps(asdict(behaviour))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        return process, ours

    return spawn


def main() -> None:
    """`python fakes.py FD BEHAVIOUR`: one fake engine on an inherited socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group
    behaviour = msgspec.json.decode(sys.argv[2], type=Behaviour)
    FakeEngine(socket.socket(fileno=int(sys.argv[1])), behaviour).run()


if __name__ == "__main__":
    main()
