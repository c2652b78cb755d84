"""Who may call what. Every route object carries a policy; without one the app is not built.

Keys are kept as SHA-256 and compared in constant time against every stored one.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hmac import compare_digest

from multilora_cli.errors import RequestError

Header = tuple[bytes, bytes]


class Policy(StrEnum):
    """What a route asks of its caller."""

    PUBLIC = "public"  # anybody who reaches the port
    TENANT = "tenant"  # any key, where keys are configured
    ADMIN = "admin"  # the admin key, where any key is configured


@dataclass(frozen=True)
class Caller:
    """Who sent a request: `tenant` separates prefix caches and metrics; empty without keys."""

    tenant: str = ""
    admin: bool = False


class KeyRing:
    """The configured keys, as hashes."""

    def __init__(self, api_keys: Sequence[str], admin_key: str | None) -> None:
        self._tenants = [_digest(key.encode()) for key in api_keys]
        self._admin = [_digest(admin_key.encode())] if admin_key else []

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
        return Caller(tenant=_name(found), admin=admin)


def tenant_of(key: str) -> str:
    """What requests with this key are known by."""
    return _name(_digest(key.encode()))


def _name(digest: bytes) -> str:
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
