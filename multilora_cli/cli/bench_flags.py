"""The flags of `mlora bench`, spelled once: what each is called and what it says of itself."""

from pathlib import Path
from typing import Annotated, Literal

import typer

# ---- a load over HTTP

Url = Annotated[
    str | None, typer.Option("--url", help="A running server, of any make. Default: our own.")
]
Offline = Annotated[
    bool, typer.Option("--offline", help="The engine of FLEET in this process, without HTTP.")
]
Heterogeneous = Annotated[
    bool, typer.Option("--heterogeneous", help="Base, identical, skewed, uniform, distinct.")
]
Preset = Annotated[
    str | None,
    typer.Option(help="punica, s-lora-table3, rank-mix, cold-start, churn or smoke."),
]
Trace = Annotated[
    Path | None, typer.Option(help="Replay a recorded load: JSON lines, as of plan --trace.")
]
Compare = Annotated[str | None, typer.Option(help="Only these loads of the preset: base,distinct.")]
Requests = Annotated[int | None, typer.Option(metavar="N", help="Requests of each load.", min=1)]
Rate = Annotated[
    str | None, typer.Option(help="Arrivals: requests/s (open loop), or inf for all at once.")
]
Cv = Annotated[
    float, typer.Option(metavar="N", help="Burstiness of arrivals; 1: Poisson.", min=0.01)
]
Concurrency = Annotated[
    int | None,
    typer.Option(metavar="N", help="Requests at once (closed loop), or their cap.", min=1),
]
Lengths = Annotated[
    str | None, typer.Option(help="IN:OUT tokens (16-64:32), or a law such as arena-like.")
]
Limit = Annotated[
    float | None,
    typer.Option(
        "--for",
        metavar="S",
        help="Seconds after which a load ends; what is in flight is cut.",
        min=1,
    ),
]
Rounds = Annotated[
    int | None, typer.Option(metavar="N", help="How often all loads take turns.", min=1, max=100)
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Of lengths, arrivals and prompts (which with --url are others in each run).",
        min=0,
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(help="The server's card (h200), for shares of the bound. Needs FLEET."),
]
Model = Annotated[
    str | None, typer.Option(help="The base's name, where a server lists several models.")
]
AdaptersFrom = Annotated[
    str, typer.Option(help="models: the server's list; or a file with a name a line.")
]
Prompts = Annotated[
    Literal["ids", "text", "chat"], typer.Option(help="ids and text go to completions.")
]
NoIgnoreEos = Annotated[
    bool,
    typer.Option("--no-ignore-eos", help="Do not send ignore_eos, which fixes output lengths."),
]
Slo = Annotated[str | None, typer.Option(help="For goodput: ttft=1s,itl=50ms,e2e=30s.")]
Timeout = Annotated[float, typer.Option(metavar="S", help="Seconds a request may take.", min=1)]
Against = Annotated[
    str | None, typer.Option(help="A second server, measured in turns with the first.")
]
AgainstApiKey = Annotated[
    str | None,
    typer.Option(envvar="MLORA_AGAINST_API_KEY", help="The key of the second server."),
]
Report = Annotated[Path | None, typer.Option(help="Write one HTML page with tables and plots.")]
Output = Annotated[Path | None, typer.Option(help="Write the JSON to a file as well.")]
Rows = Annotated[
    Path | None, typer.Option(help="Append a JSON line to a file for every load that ended.")
]
Commit = Annotated[
    str | None, typer.Option(help="The commit to record where there is no checkout.")
]

# ---- the engine without HTTP

OfflineModel = Annotated[
    str | None,
    typer.Option(
        help="A shape by name, or a folder with a config.json. Default: llama-3-8b, tiny on a CPU."
    ),
]
OfflineSettings = Annotated[
    str, typer.Option(help="Who is asked: base, one, distinct, mixed, pool.")
]
OfflineQuantization = Annotated[str, typer.Option(help="Of the base: none, fp8, awq.")]
OfflineBatch = Annotated[str, typer.Option(help="Requests at once.")]
OfflineLengths = Annotated[str, typer.Option(help="IN:OUT tokens.")]
OfflineRounds = Annotated[
    int, typer.Option(help="Measured batches a cell, after one to warm up.", min=1, max=100)
]
OfflineAdapters = Annotated[
    int, typer.Option(help="Adapters where they are distinct.", min=1, max=4096)
]
OfflineLoads = Annotated[
    int,
    typer.Option(
        help="Also load this many adapters (attention, r16), one by one, while others decode.",
        min=0,
        max=256,
    ),
]
OfflineDevice = Annotated[str, typer.Option(help="auto, cpu or cuda:N.")]
OfflineKv = Annotated[str, typer.Option(help="Memory for KV beside all adapters.")]
# The default is what eight slots of rank 16 and their KV cache took together in the engine that the
# setting compares with.
OfflineTightPool = Annotated[
    str, typer.Option(help="Memory for KV and adapters in the setting pool.")
]
OfflineMaxModelLen = Annotated[int, typer.Option(help="Context in tokens.", min=16)]
OfflineLoadFormat = Annotated[
    Literal["auto", "dummy"], typer.Option(help="dummy: random weights; auto: those of the folder.")
]
OfflineGpu = Annotated[
    str | None, typer.Option(help="The card of the bounds. Default: the one here.")
]
OfflineCache = Annotated[
    Path | None, typer.Option(help="Keep the adapters here. Default: they are removed.")
]
OfflineOutput = Annotated[Path | None, typer.Option(help="Append JSON lines to a file.")]
CapturePrompts = Annotated[
    bool, typer.Option(help="Also capture steps with short chunks of prompts.")
]
