"""Who may call what. Every route object carries a policy; without one the app is not built.

Keys are kept as SHA-256 and compared in constant time against every stored one.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from hmac import compare_digest
from types import MappingProxyType

from multilora_cli.errors import RequestError
from multilora_cli.fleet.schema import ApiKey, KeyLimits

Header = tuple[bytes, bytes]


class Policy(StrEnum):
    """What a route asks of its caller."""

    PUBLIC = "public"  # anybody who reaches the port
    TENANT = "tenant"  # any key, where keys are configured
    ADMIN = "admin"  # the admin key, where any key is configured


@dataclass(frozen=True)
class Grant:
    """What the holder of a key may do. `tenant` separates prefix caches, turns and limits."""

    tenant: str = ""  # empty without keys
    name: str = ""  # of the tenant, where the fleet file gives it one
    models: tuple[str, ...] = ("*",)
    limits: KeyLimits = field(default_factory=KeyLimits)

    @property
    def is_limited(self) -> bool:
        """Whether there is anything that it may not ask for."""
        return "*" not in self.models

    def allows(self, model: str) -> bool:
        """Whether it may ask for an adapter, or for the base by its name."""
        return any(fnmatchcase(model, glob) for glob in self.models)


@dataclass(frozen=True)
class Caller:
    """Who sent a request."""

    grant: Grant = Grant()
    admin: bool = False

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.grant.tenant


class KeyRing:
    """The configured keys, as hashes."""

    def __init__(
        self,
        api_keys: Sequence[str],
        admin_key: str | None,
        grants: Mapping[str, Grant] = MappingProxyType({}),
    ) -> None:
        """`grants`: by what `key_id` gives for the key; one without may ask for everything."""
        self._tenants = [_digest(key.encode()) for key in api_keys]
        self._grants = grants
        self._admin = [_digest(admin_key.encode())] if admin_key else []

    @property
    def fingerprint(self) -> object:
        """Equal where the same keys have the same grants."""
        return self._tenants, self._admin, dict(self._grants)

    def authorise(self, policy: Policy, headers: Sequence[Header]) -> Caller:
        """The caller, if the policy lets it in. Raises RequestError 401 or 403."""
        if policy is Policy.PUBLIC:
            return Caller()
        if not self._tenants and not self._admin:
            return Caller(admin=True)  # loopback only: the server refuses any other bind
        key = _bearer(headers)
        found = _digest(key or b"")
        tenant = _match(found, self._tenants)
        admin = _match(found, self._admin) is not None
        if key is None or (tenant is None and not admin):
            if key is None and policy is Policy.TENANT and not self._tenants:
                return Caller()
            raise _unauthenticated(missing=key is None)
        if policy is Policy.ADMIN and not admin:
            raise RequestError(
                "this key may not manage adapters; the admin key may",
                status=403,
                code="permission_denied",
                kind="permission_error",
            )
        own = key_id_of(found)
        granted = None if tenant is None else self._grants.get(own)
        return Caller(granted or Grant(own), admin)


def key_id(key: str) -> str:
    """What a key without a tenant's name is known by."""
    return key_id_of(_digest(key.encode()))


def grant_of(entry: ApiKey, key: str) -> Grant:
    """What the fleet file lets the holder of `key` do."""
    tenant = key_id(key) if entry.tenant is None else f"tenant:{entry.tenant}"
    return Grant(tenant, entry.tenant or "", entry.models, entry.limits)


def key_id_of(digest: bytes) -> str:
    """The beginning of a key's digest: enough to tell keys apart, too little to find one."""
    return digest.hex()[:12]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _match(found: bytes, stored: Sequence[bytes]) -> int | None:
    """Place of `found`, looking at every entry whatever is found."""
    place = None
    for index, digest in enumerate(stored):
        if compare_digest(found, digest):
            place = index
    return place


def _bearer(headers: Sequence[Header]) -> bytes | None:
    """The key of the one Authorization header; None without it."""
    values = [value for name, value in headers if name == b"authorization"]
    if not values:
        return None
    scheme, _, key = values[0].partition(b" ")
    if len(values) > 1 or scheme.lower() != b"bearer" or not key.strip():
        raise _unauthenticated(missing=False)
    return key.strip()


def _unauthenticated(*, missing: bool) -> RequestError:
    message = (
        "no API key; send Authorization: Bearer KEY" if missing else "the API key is not valid"
    )
    return RequestError(message, status=401, code="invalid_api_key", kind="authentication_error")
