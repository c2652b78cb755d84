"""The flags of `mlora bench` as values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multilora_cli.bench.arms import Preset
    from multilora_cli.bench.prompts import PromptStyle


@dataclass(frozen=True)
class BenchOptions:
    """The flags of the command; None takes the preset's own."""

    fleet: Path | None
    offline: bool
    url: str | None
    preset: "Preset"
    trace: Path | None
    compare: str | None
    requests: int | None
    rate: float | None
    cv: float
    concurrency: int | None
    lengths: str | None
    limit: float | None  # seconds of every load
    rounds: int | None
    seed: int
    gpu: str | None
    model: str | None
    adapters_from: str
    prompts: "PromptStyle"
    ignore_eos: bool
    slo: str | None
    timeout: float  # seconds
    rows: Path | None
    commit: str | None  # where there is no checkout
    against: str | None
    api_key: str | None
    against_api_key: str | None
    arguments: tuple[str, ...]

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any], arguments: Sequence[str]) -> "BenchOptions":
        """The options of the command's parameters, by their names. Raises BadInput."""
        from multilora_cli.bench.arms import parse_lengths

        known: dict[str, Any] = {field.name: flags.get(field.name) for field in fields(cls)}
        preset = pick_preset(flags["preset"], flags["heterogeneous"], flags["trace"])
        rate = parse_rate(flags["rate"])
        if flags["lengths"] is not None:  # told before a server is started, not after
            parse_lengths(flags["lengths"], 1, 0)
        options = cls(**known | {"preset": preset, "rate": rate, "arguments": tuple(arguments)})
        if options.offline:
            options.check_offline()
        return options

    def check_offline(self) -> None:
        """Refuse what only a server has. Raises BadInput."""
        from multilora_cli.errors import BadInput

        given = {
            "--url": self.url is not None,
            "--against": self.against is not None,
            "--prompts": self.prompts != "ids",
            "--preset churn": self.preset == "churn",
        }
        for flag, is_given in given.items():
            if is_given:
                raise BadInput(
                    f"{flag}: needs a server, and --offline measures the engine without one"
                )


def pick_preset(preset: str | None, heterogeneous: bool, trace: Path | None = None) -> "Preset":
    """The preset that the flags mean together. Raises BadInput."""
    from multilora_cli.bench.arms import PRESETS
    from multilora_cli.errors import BadInput

    if trace is not None:
        if preset is not None or heterogeneous:
            raise BadInput("--trace is a workload of its own: leave out the preset")
        return "trace"
    if preset is None:
        return "heterogeneous"
    if heterogeneous and preset != "heterogeneous":
        raise BadInput(f"--heterogeneous and --preset {preset}: give one of them")
    for known in PRESETS:
        if known == preset:
            return known
    raise BadInput(f"--preset {preset}: expected one of {', '.join(PRESETS)}")


def parse_rate(text: str | None) -> float | None:
    """Requests/s; `inf` is infinity. Raises BadInput."""
    from multilora_cli.errors import BadInput

    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not rate > 0:
        raise BadInput(f"--rate {text}: expected requests per second above 0, or inf")
    return rate


def check_writable(path: Path | None, flag: str) -> None:
    """Refuse a file that cannot be written before minutes are spent, not after. BadInput."""
    from multilora_cli.errors import BadInput

    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise BadInput(f"{flag} {path}: expected a file in a folder that exists")
