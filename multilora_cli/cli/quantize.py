"""`mlora quantize`: an FP8 or AWQ checkpoint of a 16-bit base."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import JsonOption, QuietOption

if TYPE_CHECKING:
    from multilora_cli.engine.quantize import Quantised
    from multilora_cli.progress import Report


def quantize(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder in Hugging Face format, a Hub id, or demo:base."
        ),
    ],
    to: Annotated[Literal["fp8", "awq"], typer.Option("--to", help="The storage to write.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new folder.")],
    method: Annotated[
        Literal["auto-round", "autoawq"], typer.Option(help="awq: the library that rounds.")
    ] = "auto-round",
    calibration: Annotated[
        Path | None,
        typer.Option(help="awq: a text or JSON-lines file to calibrate on; else one of ours."),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="awq: inputs that share a scale: 128, 64 or 32.")
    ] = None,
    iterations: Annotated[
        int, typer.Option(min=0, help="auto-round: search steps a layer; 0: plain rounding.")
    ] = 20,
    perplexity: Annotated[
        Path | None, typer.Option(help="A text to measure both on, before and after.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a quantised copy of a 16-bit base.

    fp8 needs nothing else. awq needs the extra `quantize` (auto-round, any device) or, with
    --method autoawq, the extra `awq` (CUDA only, no longer maintained).

    Example: mlora quantize ./llama --to fp8 --output ./llama-fp8
    """
    console = Console(as_json=as_json, quiet=quiet)
    measured: tuple[float, float] | None = None
    _existing("--perplexity", perplexity)
    _existing("--calibration", calibration)
    with console.progress() as report:
        source = _source(model, report)
        tokens = None if perplexity is None else _tokens(source, perplexity)
        if to == "fp8":
            from multilora_cli.engine.quantize import quantise_fp8

            result = quantise_fp8(source, output, report)
        else:
            from multilora_cli.engine.quantize_awq import AwqSettings, quantise_awq
            from multilora_cli.text.calibration import calibration_windows

            windows = calibration_windows(source, calibration)
            settings = AwqSettings(windows, method, group_size, iterations)
            result = quantise_awq(source, output, settings, report)
        if tokens is not None:
            measured = _perplexities(source, output, tokens, report)
    _show(console, result, measured)


def _source(model: str, report: "Report") -> Path:
    from multilora_cli.cli.base import DEMO_BASE
    from multilora_cli.demo import demo_base_path
    from multilora_cli.models.hub import fetch_model

    if model == DEMO_BASE:
        return demo_base_path()
    folder = Path(model).expanduser()
    return folder if folder.is_dir() else fetch_model(model, report=report)


def _existing(option: str, path: Path | None) -> None:
    from multilora_cli.errors import BadInput

    if path is not None and not path.is_file():
        raise BadInput(f"{option}: {path} is not a file")


def _tokens(source: Path, text: Path) -> list[int]:
    from multilora_cli.errors import BadInput
    from multilora_cli.text.calibration import read_text
    from multilora_cli.text.tokenizer import load_tokenizer

    tokens = load_tokenizer(source).encode(read_text(text, "--perplexity"))
    if len(tokens) < 2:  # said before the work, not after it
        raise BadInput(
            f"--perplexity: {text} has {len(tokens)} tokens of this model, expected at least 2"
        )
    return tokens


def _perplexities(
    source: Path, output: Path, tokens: list[int], report: "Report"
) -> tuple[float, float]:
    """Of the 16-bit base and of its quantised copy."""
    from multilora_cli.engine.perplexity import base_perplexity

    return base_perplexity(source, tokens, report), base_perplexity(output, tokens, report)


def _show(console: Console, result: "Quantised", perplexity: tuple[float, float] | None) -> None:
    from multilora_cli.units import format_size

    size = f"{format_size(result.source_bytes)} became {format_size(result.output_bytes)}"
    if console.quiet:
        console.line(str(result.output))
    else:
        console.line(f"{result.output}: {result.storage}; {size}")
        if perplexity is not None:
            console.line(f"perplexity: {perplexity[0]:.3f} before, {perplexity[1]:.3f} after")
    console.value(
        {
            "schema": "mlora.quantize/1",
            "output": str(result.output),
            "storage": result.storage,
            "source_bytes": result.source_bytes,
            "output_bytes": result.output_bytes,
            "perplexity": perplexity and {"before": perplexity[0], "after": perplexity[1]},
        }
    )
