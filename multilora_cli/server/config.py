"""What the front process is told at its start."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from multilora_cli.errors import BadInput
from multilora_cli.server.auth import Grant, key_id

QUEUED = 1024  # answers that wait beside those that run


@dataclass(frozen=True)
class ServerLimits:
    """Bounds that protect the front process. Sizes in bytes, times in seconds."""

    max_body_bytes: int = 4 * 2**20
    max_fleet_bytes: int = 32 * 2**20  # of a fleet that `mlora apply` sends
    max_large_bodies: int = 64  # above 64 KiB, or of unknown length, read at the same time
    max_header_bytes: int = 64 * 2**10
    max_headers: int = 100
    max_connections: int = 4096
    max_connections_per_address: int = 256  # loopback is exempt: proxies and benchmarks
    max_sequences: int = 256 + QUEUED  # admitted and unfinished, running or waiting
    header_s: float = 10.0
    body_s: float = 30.0
    idle_s: float = 60.0
    write_stall_s: float = 60.0
    request_s: float = 600.0
    load_s: float = 60.0
    text_threads: int = 4  # that render templates and tokenize
    named_adapters: int = 100  # with metric series of their own; the rest share `other`
    named_tenants: int = 100


@dataclass(frozen=True)
class ServerConfig:
    """Everything the front needs; built from the fleet by the command line."""

    base_name: str
    base_path: Path  # folder with tokenizer.json
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    base_digest: str = ""
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # the secrets themselves
    admin_key: str | None = field(default=None, repr=False)
    grants: Mapping[str, Grant] = field(default_factory=dict)  # by auth.key_id of the key
    max_resolved: int = 10_000  # names of patterns known at a time
    max_loras: int = 64  # adapters in one step, as metrics tell routers
    host_adapter_bytes: int = 8 * 2**30  # of adapters in host memory
    allowed_hosts: tuple[str, ...] = ()  # Host names beside the loopback ones
    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant or adapter name
    drain_s: float = 30.0
    record: Path | None = None  # where the load is recorded, as `mlora bench --trace` reads it
    limits: ServerLimits = ServerLimits()

    def __post_init__(self) -> None:
        if any(not key for key in (*self.api_keys, self.admin_key or "-")):
            raise BadInput("server.api_keys: a key is empty")
        if not self.loopback and not self.api_keys:
            raise BadInput(
                f"server.host: {self.host} is reachable from other machines, and server.api_keys"
                " names no key",
                hint="add api_keys: [env:MLORA_KEY], or listen on 127.0.0.1",
            )
        if not 0 <= self.port < 2**16:
            raise BadInput(f"server.port: found {self.port}, expected 0 to 65535")

    @property
    def tenants(self) -> frozenset[str]:
        """Whose keys there are."""
        ids = map(key_id, self.api_keys)
        return frozenset(self.grants[own].tenant if own in self.grants else own for own in ids)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host.strip("[]"))


def is_loopback(host: str) -> bool:
    """Whether a host name or address stands for this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
