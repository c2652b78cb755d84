"""Where adapters come from: `resolve_source` turns the text of a source into a local folder."""

from collections.abc import Mapping
from pathlib import Path

from multilora_cli.adapters.source.base import Source, SourceContext
from multilora_cli.adapters.source.demo import DemoSource
from multilora_cli.adapters.source.dummy import DummySource
from multilora_cli.adapters.source.local import LocalSource, is_url
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import ModelGeometry

_SOURCES: Mapping[str, Source] = {"demo": DemoSource(), "dummy": DummySource()}
_LOCAL: Source = LocalSource()
_NOT_YET = {"hf": "the Hugging Face Hub", "s3": "S3"}


def resolve_source(
    spec: str,
    *,
    relative_to: Path,
    geometry: ModelGeometry | None = None,
    cache: Path | None = None,
) -> Path:
    """The folder that `spec` stands for. Raises AdapterError.

    Args:
        spec: a folder, `demo:NAME`, or `dummy:rank=16,targets=all,seed=3`.
        relative_to: what relative folders are relative to, such as the fleet file's folder.
        geometry: the base's shape, which `dummy:` needs.
        cache: where `dummy:` writes its folders; made if missing.
    """
    context = SourceContext(relative_to, geometry, cache)
    scheme, separator, rest = spec.partition(":")
    if separator and scheme in _SOURCES:
        return _SOURCES[scheme].resolve(rest, context)
    if separator and scheme in _NOT_YET and rest.startswith("//"):
        raise AdapterError(
            f"source {quoted(spec)}: not yet: adapters are not fetched from {_NOT_YET[scheme]}",
            reason="source",
            hint="download the adapter and name its folder",
        )
    if is_url(spec):
        raise AdapterError(
            f"source {quoted(spec)}: a URL; expected a folder, demo:NAME or dummy:...",
            reason="source",
        )
    return _LOCAL.resolve(spec, context)


__all__ = ["Source", "SourceContext", "resolve_source"]
