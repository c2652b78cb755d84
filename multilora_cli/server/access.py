"""The keys that let callers in, as the fleet file has them, and how they change while it runs.

A fleet file names secrets and never holds them. What stands in the environment is taken out of it
at the start, so that no child inherits it, and is remembered here; files are read anew each time.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from multilora_cli.errors import FleetError
from multilora_cli.fleet.load import resolve_secret
from multilora_cli.fleet.schema import Fleet
from multilora_cli.server.auth import Grant, KeyRing, grant_of, key_id
from multilora_cli.server.config import ServerConfig

# Settings that `mlora apply` and SIGHUP change; all others need a restart.
LIVE_SETTINGS = ("server.api_keys", "server.admin_key", "limits.weights")


class Secrets:
    """What references of one fleet file stand for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._taken: dict[str, str] = {}

    def get(self, reference: str) -> str:
        """The secret. Raises FleetError."""
        kind, _, name = reference.partition(":")
        if kind != "env":
            return resolve_secret(reference, self._folder)
        if reference not in self._taken or name in os.environ:
            self._taken[reference] = resolve_secret(reference, self._folder)
            del os.environ[name]
        return self._taken[reference]


@dataclass(frozen=True)
class Keys:
    """The part of a ServerConfig that is about keys."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    grants: Mapping[str, Grant] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


def keys_of(fleet: Fleet, secrets: Secrets) -> Keys:
    """The keys that a fleet file names. Raises FleetError where one cannot be had."""
    server = fleet.server
    known = {reference: secrets.get(reference) for reference in server.secrets}
    grants = [(known[each.key], grant_of(each, known[each.key])) for each in server.keys]
    weights = fleet.limits.weights
    if fleet.limits.fairness == "tenant":
        weights = {
            grant.tenant: fleet.limits.weights[name]
            for each, (_, grant) in zip(server.keys, grants, strict=True)
            for name in (each.key, each.tenant)
            if name in fleet.limits.weights
        }
    return Keys(
        api_keys=tuple(key for key, _ in grants),
        admin_key=known[server.admin_key] if server.admin_key is not None else None,
        grants={key_id(key): grant for key, grant in grants},
        weights=weights,
    )


@dataclass(frozen=True)
class Access:
    """Who is let in, and what turns they have."""

    ring: KeyRing
    weights: Mapping[str, float]
    tenants: frozenset[str]

    @classmethod
    def of(cls, config: ServerConfig) -> "Access":
        """As the configuration says."""
        ring = KeyRing(config.api_keys, config.admin_key, config.grants)
        return cls(ring, config.weights, config.tenants)

    @property
    def fingerprint(self) -> object:
        """Equal where the same callers may do the same."""
        return self.ring.fingerprint, dict(self.weights)

    def weight(self, tenant: str, adapter: str | None) -> float:
        """Of the share that a request belongs to: its tenant's or its adapter's."""
        return self.weights.get(adapter or "") or self.weights.get(tenant, 1.0)


class LiveAccess:
    """The access of now. Belongs to the event loop, but for `read`."""

    def __init__(self, config: ServerConfig, secrets: Secrets | None = None) -> None:
        """`secrets`: None where keys cannot change."""
        self._config = config
        self._secrets = secrets
        self.now = Access.of(config)
        self.on_change: list[Callable[[Access], None]] = []

    @property
    def may_change(self) -> bool:
        """Whether it is known where keys are had."""
        return self._secrets is not None

    def read(self, settings: Mapping[str, Any]) -> Access:
        """What other settings of the fleet file would make it. Raises MloraError."""
        if self._secrets is None:
            raise FleetError("the keys of this server cannot change while it runs")
        sections: dict[str, dict[str, Any]] = {"limits": {}, "server": {}}
        for name in (*LIVE_SETTINGS, "limits.fairness"):
            section, _, key = name.partition(".")
            if name in settings:
                sections[section][key] = settings[name]
        try:
            fleet = Fleet.model_validate({"base": {"model": "any"}, **sections})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise FleetError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        try:
            keys = keys_of(fleet, self._secrets)
        except FleetError as error:
            hint = "a running server sees no new variables: file:PATH, or restart it"
            raise FleetError(error.message, hint=hint) from None
        return Access.of(replace(self._config, **vars(keys)))  # which refuses an open door

    def use(self, access: Access) -> None:
        """From now on."""
        self.now = access
        for changed in self.on_change:
            changed(access)
