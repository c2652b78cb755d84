"""An engine of this process in the place of a server: it lists its adapters and takes loads."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from multilora_cli.adapters.registry import Registry
from multilora_cli.bench.engine_load import EngineSide, run_engine_load
from multilora_cli.bench.load import Load, LoadResult, PlannedRequest
from multilora_cli.bench.offline import Engine
from multilora_cli.bench.target import Adapter, Fleet
from multilora_cli.engine.messages import AdapterRef, EvictAdapter
from multilora_cli.errors import BadInput


@dataclass(frozen=True)
class BaseFacts:
    """What the engine's base is called and what it holds."""

    name: str
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()


class EngineTarget:
    """Drives an engine as its server would; adapters are those of a registry."""

    url = "the engine alone"

    def __init__(self, engine: Engine, registry: Registry, base: BaseFacts) -> None:
        self._engine = engine
        self._registry = registry
        self._base = base
        self._asked: Counter[str] = Counter()
        self._calls = count(1)
        self._ids = 1

    async def fleet(self, base_name: str | None = None) -> Fleet:
        """Base and adapters, with rank, tier and counters. Raises BadInput for another base."""
        if base_name not in (None, self._base.name):
            raise BadInput(f"--model {base_name}: the fleet's base is {self._base.name}")
        statuses = {status.digest: status for status in self._engine.snapshot().adapters}
        adapters = []
        for entry in self._registry.entries():
            if entry.state == "failed":
                continue
            status = statuses.get(entry.digest or "")
            elsewhere = "cold" if entry.digest is None else "stored"
            adapters.append(
                Adapter(
                    name=entry.name,
                    path=entry.path,
                    rank=entry.rank,
                    tier=elsewhere if status is None else status.tier,
                    requests=self._asked[entry.name],
                    hits=0 if status is None else status.hits,
                    loads=0 if status is None else status.loads,
                )
            )
        return Fleet(self._base.name, tuple(adapters), self._base.max_model_len)

    async def drive(self, requests: Sequence[PlannedRequest], load: Load) -> LoadResult:
        """Put a load on the engine; files of adapters are digested before its clock starts."""
        names = {request.adapter for request in requests} - {None}
        refs = {name: self._ref(name) for name in names if name is not None}
        side = EngineSide(self._engine, refs, self._take_ids, self._base.eos_token_ids)
        result = await run_engine_load(side, requests, load)
        self._asked.update(r.adapter for r in result.records if r.adapter is not None)
        return result

    async def load(self, name: str, path: str, *, inplace: bool = False) -> None:
        """Refused: what names stand for is the server's business."""
        raise BadInput("the engine alone has no names to load: measure that on a server")

    async def unload(self, name: str) -> None:
        """Refused, as `load` is."""
        await self.load(name, "")

    async def evict(self, name: str, *, cold: bool = False) -> None:
        """Move an adapter to host memory, or out of it too."""
        call = next(self._calls)
        digest = self._ref(name).digest
        self._engine.handle(EvictAdapter(call, digest, "cold" if cold else "warm"))
        while not any(reply.call_id == call for reply in self._engine.take_replies()):
            self._engine.step()

    def _ref(self, name: str) -> AdapterRef:
        return AdapterRef.of(self._registry.with_digest(name))

    def _take_ids(self, number: int) -> int:
        first = self._ids
        self._ids += number
        return first
