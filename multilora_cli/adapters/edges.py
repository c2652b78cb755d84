"""Binds what an adapter has on the embedding and the output head: LoRA or whole matrices."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from multilora_cli.adapters.peft_config import AdapterConfig
from multilora_cli.adapters.refusal import Refusal
from multilora_cli.adapters.safetensors_header import TensorEntry
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.adapters.tensor_names import EDGES, EdgeModule, EdgeName, Part
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_kernels.layout import MAX_RANK, MatrixName


@dataclass(frozen=True, slots=True)
class EdgeWeights:
    """LoRA on the embedding or the head; scaling is alpha / r (or alpha / sqrt(r))."""

    lora_a: TensorEntry  # embedding: [rank, vocab]; head: [rank, hidden]
    lora_b: TensorEntry  # embedding: [hidden, rank]; head: [vocab, rank]
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of single tokens in place of the base's."""

    entry: TensorEntry  # [number of tokens, hidden]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Edges:
    """All that an adapter has outside of the layers, by module; a module has one of the three."""

    lora: Mapping[EdgeModule, EdgeWeights] = field(default_factory=dict)
    saved: Mapping[EdgeModule, TensorEntry] = field(default_factory=dict)  # [vocab, hidden]
    token_rows: Mapping[EdgeModule, TokenRows] = field(default_factory=dict)
    vocab_size: int = 0  # of the base

    @property
    def matrices(self) -> frozenset[tuple[MatrixName, int, int]]:
        """Name, rows and row length of every matrix that is served (`layout.MATRICES`)."""
        found: set[tuple[MatrixName, int, int]] = set()
        for module, entry in self.saved.items():
            found.add((f"{module}.weight", *entry.shape))  # type: ignore[arg-type]
        for module, weights in self.lora.items():
            rank, columns = weights.lora_a.shape
            rows = weights.lora_b.shape[0]
            a = (columns, rank) if module == "embed_tokens" else (rank, columns)
            found.add((f"{module}.a", *a))  # type: ignore[arg-type]
            found.add((f"{module}.b", rows, rank))  # type: ignore[arg-type]
        # E' = E + sum over tokens of e_token (row - E[token]): LoRA of a rank for each token.
        for module, token_rows in self.token_rows.items():
            count, hidden = token_rows.entry.shape
            vocab = self.vocab_size
            a, b = (vocab, count), (hidden, count)
            if module == "lm_head":
                a, b = (count, hidden), (vocab, count)
            found.add((f"{module}.a", *a))  # type: ignore[arg-type]
            found.add((f"{module}.b", *b))  # type: ignore[arg-type]
        return frozenset(found)


_Parts = Mapping[Part, TensorEntry]


class EdgeBinder:
    """Binds tensors of embedding and head to a base, or refuses the adapter."""

    def __init__(self, config: AdapterConfig, geometry: ModelGeometry, refusal: Refusal) -> None:
        self._config = config
        self._geometry = geometry
        self._refusal = refusal

    def bind(
        self, names: Mapping[str, EdgeName], tensors: Mapping[str, TensorEntry], max_rank: int
    ) -> Edges:
        """What the adapter has on both. Raises AdapterError."""
        parts: dict[EdgeModule, dict[Part, TensorEntry]] = {}
        for name, parsed in names.items():
            found = parts.setdefault(parsed.module, {})
            if parsed.part in found:
                self._refusal.tensor(name, f"{parsed.module} has it twice", "duplicate")
            found[parsed.part] = tensors[name]
        lora: dict[EdgeModule, EdgeWeights] = {}
        saved: dict[EdgeModule, TensorEntry] = {}
        rows: dict[EdgeModule, TokenRows] = {}
        for module, found in parts.items():
            if "token_rows" in found:
                rows[module] = self._token_rows(module, found)
            elif "weight" in found:
                saved[module] = self._saved(module, found)
            else:
                lora[module] = self._lora(module, found, max_rank)
        self._check_declared(lora, saved)
        self._share_rows(rows, bool(lora or saved))
        return Edges(lora, saved, rows, self._geometry.vocab_size)

    def _token_rows(self, module: EdgeModule, found: _Parts) -> TokenRows:
        entry, tokens = found["token_rows"], self._config.token_indices.get(module, ())
        vocab = self._geometry.vocab_size
        problem = ""
        if len(found) > 1:
            problem = f"{module} is adapted in another way too"
        elif len(set(tokens)) != len(tokens) or max(tokens, default=0) >= vocab:
            problem = f"the config's tokens are not different ones below {vocab:,}"
        elif len(tokens) > MAX_RANK:
            problem = f"{len(tokens):,} tokens, at most {MAX_RANK} are served; save the matrix"
        if problem:
            self._refusal.field(
                "trainable_token_indices", f"tensor {quoted(entry.name)}: {problem}", "unsupported"
            )
        self._check_shape(entry, [len(tokens), self._geometry.hidden_size])
        return TokenRows(entry, tokens)

    def _share_rows(self, rows: dict[EdgeModule, TokenRows], has_others: bool) -> None:
        """What is declared is there; on a tied base the embedding's rows are the head's too."""
        for module in self._config.token_indices:
            if module not in rows:
                self._refusal.field(
                    "trainable_token_indices",
                    f"{module} has no trainable_tokens_delta",
                    "missing_tensors",
                )
        if self._geometry.tie_word_embeddings and set(rows) == {"embed_tokens"}:
            if has_others:
                self._refusal.field(
                    "trainable_token_indices",
                    "on a tied base they cannot be combined with an"
                    " adapted or saved embedding or head",
                    "unsupported",
                )
            rows["lm_head"] = rows["embed_tokens"]

    def _saved(self, module: EdgeModule, found: _Parts) -> TensorEntry:
        entry = found["weight"]
        if len(found) > 1:
            self._refusal.tensor(
                entry.name, f"{module} is saved whole and adapted too", "duplicate"
            )
        wanted = [self._geometry.vocab_size, self._geometry.hidden_size]
        if entry.shape[1:] == (wanted[1],) and entry.shape[0] != wanted[0]:
            self._refusal.tensor(
                entry.name,
                f"shape {list(entry.shape)}, the base has {wanted}:"
                " tokens were added in training, which is not supported; serve a base with"
                " resized embeddings, and the adapter without them",
                "vocabulary",
            )
        self._check_shape(entry, wanted)
        return entry

    def _lora(self, module: EdgeModule, found: _Parts, max_rank: int) -> EdgeWeights:
        self._check_parts(module, found)
        a, b = found["A"], found["B"]
        vocab, hidden = self._geometry.vocab_size, self._geometry.hidden_size
        d_in, d_out = (vocab, hidden) if module == "embed_tokens" else (hidden, vocab)
        rank = a.shape[0] if a.shape else 0
        self._check_shape(a, [rank, d_in])
        self._check_shape(b, [d_out, rank])
        path = self._path(module)
        declared = self._config.rank_of(path)
        if declared != rank or not 0 < rank <= max_rank:
            limit = f"the config says {declared}" if declared != rank else f"the limit {max_rank}"
            self._refusal.tensor(a.name, f"rank {rank}, {limit}", "rank")
        return EdgeWeights(a, b, rank, self._config.scaling_of(path, rank))

    def _check_parts(self, module: EdgeModule, found: _Parts) -> None:
        first = next(iter(found.values()))
        for part, what in (("magnitude", "DoRA (use_dora)"), ("lora_bias", "lora_bias")):
            if part in found:
                self._refusal.tensor(
                    first.name,
                    f"{what} on {module} is not supported; leave {module} out of target_modules",
                    "unsupported",
                )
        self._refusal.check_pair(found)

    def _check_shape(self, entry: TensorEntry, wanted: list[int]) -> None:
        if list(entry.shape) != wanted or entry.nbytes == 0:
            self._refusal.tensor(
                entry.name, f"shape {list(entry.shape)}, the base needs {wanted}", "base_mismatch"
            )
        self._refusal.check_dtype(entry)

    def _path(self, module: EdgeModule) -> str:
        return "lm_head" if module == "lm_head" else "model.embed_tokens"

    def _check_declared(
        self, lora: Mapping[EdgeModule, EdgeWeights], saved: Mapping[EdgeModule, TensorEntry]
    ) -> None:
        """What has tensors is what the config names, and the other way round."""
        for module in EDGES:
            if self._config.targets(self._path(module)) != (module in lora):
                what = "is adapted but left out" if module in lora else "has no tensors"
                self._refusal.field("target_modules", f"{module} {what}", "missing_tensors")
        if lora and self._config.ensure_weight_tying and self._geometry.tie_word_embeddings:
            self._refusal.field(
                "ensure_weight_tying",
                "one LoRA shared by embedding and head is not supported;"
                " train with target_modules that name the projections alone",
                "unsupported",
            )
        for named in self._config.modules_to_save:
            name = named.rpartition(".")[2]
            if name not in EDGES:
                self._refusal.field(
                    "modules_to_save",
                    f"found {quoted(named)}: of whole modules only embed_tokens"
                    " and lm_head are served; train that module as LoRA, or merge it into a base",
                    "unsupported",
                )
            if name not in saved:
                self._refusal.field(
                    "modules_to_save", f"{name} is declared but has no tensor", "missing_tensors"
                )
