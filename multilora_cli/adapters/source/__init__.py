"""Where adapters come from: `resolve_source` turns the text of a source into a local folder."""

from collections.abc import Mapping
from pathlib import Path

from multilora_cli.adapters.source.base import Source, SourceContext
from multilora_cli.adapters.source.demo import DemoSource
from multilora_cli.adapters.source.dummy import DummySource, make_dummies, shape_alone
from multilora_cli.adapters.source.hub import open_hub, parse_hub
from multilora_cli.adapters.source.local import LocalSource
from multilora_cli.adapters.source.remote import Fetched, RemoteSource
from multilora_cli.adapters.source.s3 import open_s3, parse_s3
from multilora_cli.adapters.store import DiskStore
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import AdapterError
from multilora_cli.fleet.pattern import is_folder
from multilora_cli.fleet.schema import REMOTE_SCHEMES
from multilora_cli.sizing.geometry import ModelGeometry

REMOTE: Mapping[str, RemoteSource] = {
    "hf": RemoteSource(parse_hub, open_hub),
    "s3": RemoteSource(parse_s3, open_s3),
}
_SOURCES: Mapping[str, Source] = {"demo": DemoSource(), "dummy": DummySource(), **REMOTE}
_LOCAL: Source = LocalSource()


def is_remote(spec: str) -> bool:
    """Whether `spec` is fetched from a hub or a bucket."""
    return spec.startswith(REMOTE_SCHEMES)


def resolve_source(
    spec: str,
    *,
    relative_to: Path,
    geometry: ModelGeometry | None = None,
    cache: Path | None = None,
    store: DiskStore | None = None,
    digest: str | None = None,
    text_files: tuple[str, ...] = (),
) -> Path:
    """The folder that `spec` stands for. Raises AdapterError, AdapterUnavailable.

    Args:
        spec: a folder, `demo:NAME`, `dummy:rank=16,targets=all,seed=3`, `hf://org/name@revision`
            or `s3://bucket/prefix/`.
        relative_to: what relative folders are relative to, such as the fleet file's folder.
        geometry: the base's shape, which `dummy:` needs.
        cache: where `dummy:` writes its folders; made if missing.
        store: where remote adapters are kept.
        digest: sha256 hex, with or without `sha256:`; other remote content is refused.
        text_files: what a remote adapter is fetched with beside config and weights, where it is
            there (`AdapterRequest.text_files`); its digest covers them.
    """
    wanted = digest.removeprefix("sha256:") if digest else None
    context = SourceContext(relative_to, geometry, cache, store, wanted, text_files)
    scheme, separator, rest = spec.partition(":")
    if separator and scheme in _SOURCES:
        return _SOURCES[scheme].resolve(rest, context)
    if not is_folder(spec):
        raise AdapterError(
            f"source {quoted(spec)}: a URL; expected a folder, demo:NAME, dummy:...,"
            " hf://org/name or s3://bucket/prefix/",
            reason="source",
        )
    return _LOCAL.resolve(spec, context)


__all__ = [
    "REMOTE", "Fetched", "Source", "SourceContext", "is_remote", "make_dummies", "resolve_source",
    "shape_alone",
]  # fmt: skip
