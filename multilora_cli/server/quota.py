"""How much a tenant may ask for: requests in flight, requests and tokens a minute, its share of the
queue.

Limits hold in every window of 60 seconds of the monotonic clock. A prompt counts when it is
admitted and an answer as it is generated, so what was admitted may end above the tokens of its
minute; nothing more is admitted then.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from multilora_cli.errors import RequestError
from multilora_cli.server.auth import Grant
from multilora_cli.server.families import counters, gauges

WINDOW_S = 60.0
_GRAIN_S = 1.0  # what came within a second is forgotten together, 60 s after the last of it
_OTHER = "other"


class Window:
    """A sum over the last minute, never too small: at most 62 entries, however much is added."""

    def __init__(self) -> None:
        self._grains: deque[list[float]] = deque()  # first, last, amount
        self._sum = 0.0

    def add(self, amount: float, now_s: float) -> None:
        """Count `amount` now."""
        self._sum += amount
        if self._grains and now_s - self._grains[-1][0] < _GRAIN_S:
            self._grains[-1][1] = now_s
            self._grains[-1][2] += amount
        else:
            self._grains.append([now_s, now_s, amount])

    def used(self, now_s: float) -> float:
        """The sum over the last 60 s."""
        while self._grains and now_s - self._grains[0][1] >= WINDOW_S:
            self._sum -= self._grains.popleft()[2]
        return self._sum

    def wait_s(self, excess: float, now_s: float) -> float:
        """Seconds until at least `excess` of the sum is forgotten."""
        for _, last_s, amount in self._grains:
            excess -= amount
            if excess <= 0:
                return max(last_s + WINDOW_S - now_s, 0.0)
        return WINDOW_S


@dataclass
class Account:
    """What one tenant uses now, and did in all."""

    name: str  # empty: a key without a tenant name, shown with all others
    in_flight: int = 0
    sequences: int = 0
    requests: int = 0
    tokens: int = 0
    throttled: int = 0
    last_requests: Window = field(default_factory=Window)
    last_tokens: Window = field(default_factory=Window)


class Quotas:
    """The accounts of all tenants: as many as keys are configured."""

    def __init__(
        self,
        max_sequences: int,
        num_tenants: int,
        *,
        num_shown: int = 100,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_sequences`: of all tenants together. With several, none may hold more than half of
        them, so that a full queue of one is no closed door for the others."""
        self._max_sequences = max_sequences
        self._share = self._share_of(num_tenants)
        self._num_shown = num_shown
        self._now = now
        self._accounts: dict[str, Account] = {}

    def _share_of(self, num_tenants: int) -> int:
        return self._max_sequences if num_tenants < 2 else max(self._max_sequences // 2, 1)

    def regroup(self, tenants: Collection[str]) -> None:
        """Other keys are configured: what is known of others goes once nothing of theirs runs."""
        self._share = self._share_of(len(tenants))
        for tenant, account in list(self._accounts.items()):
            if tenant not in tenants and not account.in_flight:
                del self._accounts[tenant]

    def take(self, grant: Grant, prompt_tokens: int, sequences: int) -> "Held":
        """Admit a request, until `Held.end`. Raises RequestError 429, or 400 where it never can."""
        account = self._accounts.setdefault(grant.tenant, Account(grant.name))
        now_s = self._now()
        refused = self._refused(account, grant, prompt_tokens, sequences, now_s)
        if refused is not None:
            account.throttled += 1
            refused.headers = _headers(grant, account, now_s)
            raise refused
        account.in_flight += 1
        account.sequences += sequences
        account.requests += 1
        account.last_requests.add(1, now_s)
        held = Held(self._now, grant, account, sequences)
        held.used(prompt_tokens)
        return held

    def _refused(
        self, account: Account, grant: Grant, prompt_tokens: int, sequences: int, now_s: float
    ) -> RequestError | None:
        limits = grant.limits
        if limits.max_requests is not None and account.in_flight >= limits.max_requests:
            return _throttled(f"{limits.max_requests} requests in flight", 1.0)
        if account.sequences + sequences > self._share:
            return _throttled(
                f"{self._share} answers in flight, a tenant's share of the queue", 1.0
            )
        most = limits.requests_per_minute
        if most is not None and account.last_requests.used(now_s) + 1 > most:
            return _throttled(f"{most} requests a minute", account.last_requests.wait_s(1, now_s))
        most = limits.tokens_per_minute
        if most is None:
            return None
        if prompt_tokens > most:
            return RequestError(
                f"the prompt has {prompt_tokens} tokens, this key may use {most} a minute",
                code="request_too_large",
            )
        excess = account.last_tokens.used(now_s) + prompt_tokens - most
        if excess > 0:
            return _throttled(f"{most} tokens a minute", account.last_tokens.wait_s(excess, now_s))
        return None

    def collect(self) -> Iterator[str]:
        """The families of a scrape: named tenants, as many as may have series of their own."""
        rows: dict[str, list[Account]] = {}
        for account in self._accounts.values():
            known = account.name in rows or len(rows) < self._num_shown
            name = account.name if account.name and known else _OTHER
            rows.setdefault(name, []).append(account)
        for attribute, text in (
            ("requests", "Requests that were admitted, by tenant."),
            ("tokens", "Tokens in and out, by tenant."),
            ("throttled", "Requests answered 429, by tenant."),
        ):
            yield counters(f"mlora_tenant_{attribute}", text, "tenant", _sums(rows, attribute))
        yield gauges("mlora_tenant_in_flight", "Requests now.", "tenant", _sums(rows, "in_flight"))


class Held:
    """One admitted request's part of its tenant's limits."""

    def __init__(
        self, now: Callable[[], float], grant: Grant, account: Account, sequences: int
    ) -> None:
        self._now = now
        self._account = account
        self._sequences = sequences
        self.headers = _headers(grant, account, now())

    def used(self, tokens: int) -> None:
        """Prompt or answer, now."""
        self._account.tokens += tokens
        self._account.last_tokens.add(tokens, self._now())

    def end(self) -> None:
        """The request is over; once."""
        self._account.in_flight -= 1
        self._account.sequences -= self._sequences


def _sums(rows: Mapping[str, list[Account]], attribute: str) -> dict[str, float]:
    return {
        name: sum(getattr(account, attribute) for account in accounts)
        for name, accounts in rows.items()
    }


def _throttled(limit: str, wait_s: float) -> RequestError:
    return RequestError(
        f"this key's limit is reached: {limit}",
        status=429,
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        retry_after_s=max(wait_s, 1.0),
    )


def _headers(grant: Grant, account: Account, now_s: float) -> Mapping[str, str]:
    """OpenAI's words for what is left of the limits that there are."""
    headers = {}
    for kind, most, window in (
        ("requests", grant.limits.requests_per_minute, account.last_requests),
        ("tokens", grant.limits.tokens_per_minute, account.last_tokens),
    ):
        if most is not None:
            used = window.used(now_s)
            headers[f"x-ratelimit-limit-{kind}"] = str(most)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(int(most - used), 0))
            headers[f"x-ratelimit-reset-{kind}"] = f"{window.wait_s(used, now_s):.3f}s"
    return headers
