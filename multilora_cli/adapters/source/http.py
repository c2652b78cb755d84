"""HTTP as fetching needs it: redirects to declared hosts only, bodies of the expected size only.

Every request goes through `HttpClient`, which never puts a query string, a header or a body of the
other side into an error message: presigned URLs and error pages hold keys.
"""

import email.utils
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any

import httpx

from multilora_cli.adapters.source.fetch import (
    ChangedError,
    FetchError,
    FetchLimits,
    MissingError,
    RateFloor,
    RefusedError,
    TransientError,
)
from multilora_cli.adapters.strict_json import JsonError, parse_json, quoted

_REDIRECTS_MAX = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (408, 425, 429, 500, 502, 503, 504)
# Where clouds hand out the machine's own credentials, beside all link-local addresses.
_METADATA = frozenset(
    ipaddress.ip_address(text) for text in ("fd00:ec2::254", "100.100.100.200", "192.0.0.192")
)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Which hosts one adapter may be read from: the endpoint's, and names below `domains`."""

    endpoint: str
    domains: tuple[str, ...] = ()  # https on the default port only

    def is_endpoint(self, url: httpx.URL) -> bool:
        """Whether `url` has the endpoint's scheme, host and port; only there keys are sent."""
        return _origin(url) == _origin(httpx.URL(self.endpoint))

    def allows(self, url: httpx.URL) -> bool:
        """Whether a redirect to `url` is followed."""
        if self.is_endpoint(url):
            return True
        declared = any(
            url.host == domain or url.host.endswith(f".{domain}") for domain in self.domains
        )
        return url.scheme == "https" and url.port is None and declared


class HttpClient:
    """Requests to one endpoint, for the life of one fetch. Raises FetchError.

    Args:
        explain: words and hint for a status that means no access.
    """

    def __init__(
        self,
        hosts: Hosts,
        limits: FetchLimits,
        headers: Mapping[str, str],
        explain: Callable[[int], tuple[str, str]],
    ) -> None:
        self._hosts = hosts
        self._limits = limits
        self._headers = headers
        self._explain = explain
        self._streams: list[Any] = []
        self._client = httpx.Client(
            verify=_tls(),
            follow_redirects=False,
            timeout=httpx.Timeout(limits.stall_s, connect=limits.connect_s),
        )

    def __enter__(self) -> "HttpClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._client.close()

    def json(
        self, method: str, url: str, *, max_bytes: int, data: Mapping[str, Any] | None = None
    ) -> Any:
        """The JSON value of an answer of at most `max_bytes`."""
        with self._answer(method, url, data=data) as response:
            body = bytearray()
            for part in self._parts(response):
                body += part
                if len(body) > max_bytes:
                    raise RefusedError(f"an answer of more than {max_bytes:,} bytes")
        try:
            return parse_json(bytes(body))
        except JsonError as error:
            raise TransientError(f"an answer that is no JSON: {error}") from None

    def head(self, url: str) -> httpx.Headers:
        """The headers of the answer to HEAD."""
        with self._answer("HEAD", url) as response:
            return response.headers

    def read(self, url: str, size: int, headers: Mapping[str, str]) -> Iterator[bytes]:
        """The body of exactly `size` bytes, as it comes."""
        with self._answer("GET", url, headers=headers) as response:
            if response.status_code != 200:
                raise TransientError(f"HTTP {response.status_code}, expected 200")
            length = response.headers.get("content-length")
            if length is not None and length != str(size):
                raise TransientError(f"says {quoted(length)} bytes, expected {size:,}")
            match = headers.get("If-Match")
            if match is not None and response.headers.get("etag", match) != match:
                raise ChangedError("another version than the one that was looked up")
            done = 0
            for part in self._parts(response):
                done += len(part)
                if done > size:
                    raise TransientError(f"sends more than the expected {size:,} bytes")
                yield part
            if done < size:
                raise TransientError(f"ends after {done:,} of {size:,} bytes")

    def _parts(self, response: httpx.Response) -> Iterator[bytes]:
        coding = response.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise RefusedError(f"content-encoding: found {quoted(coding)}, expected none")
        floor = RateFloor(self._limits)
        with self._failures(response.url.host):
            for part in response.iter_raw():  # as it comes: a drip must not hide in a buffer
                floor.count(len(part))
                yield part

    @contextmanager
    def _answer(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> Iterator[httpx.Response]:
        """The first answer that is no redirect, its status checked."""
        at = httpx.URL(url)
        for _ in range(_REDIRECTS_MAX + 1):
            response = self._send(method, at, headers or {}, data)
            try:
                if response.status_code not in _REDIRECTS:
                    self._check_status(response)
                    yield response
                    return
                at = self._next(response)
            finally:
                response.close()
        raise RefusedError(f"more than {_REDIRECTS_MAX} redirects")

    def _send(
        self, method: str, url: httpx.URL, headers: Mapping[str, str], data: Any
    ) -> httpx.Response:
        _refuse_metadata(url)
        sent = {"Accept-Encoding": "identity", **headers}
        if self._hosts.is_endpoint(url):
            sent |= self._headers
        with self._failures(url.host), self._head_within(self._limits) as trace:
            request = self._client.build_request(
                method, url, headers=sent, data=data, extensions={"trace": trace}
            )
            return self._client.send(request, stream=True)

    @contextmanager
    def _head_within(self, limits: FetchLimits) -> Iterator[Callable[[str, Any], None]]:
        """Shut the connection where no head of an answer came in time, however slowly it drips."""

        def trace(event: str, info: Mapping[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                self._streams.append(info["return_value"])

        def shut() -> None:
            for stream in self._streams:
                _shut(stream)

        timer = threading.Timer(limits.connect_s + 2 * limits.stall_s, shut)
        timer.daemon = True
        timer.start()
        try:
            yield trace
        finally:
            timer.cancel()

    def _next(self, response: httpx.Response) -> httpx.URL:
        try:
            url = response.url.join(response.headers.get("location", ""))
        except (httpx.InvalidURL, ValueError):
            raise RefusedError("a redirect to something that is no URL") from None
        if not self._hosts.allows(url):
            raise RefusedError(
                f"a redirect to {quoted(f'{url.scheme}://{url.netloc.decode()}')}, which is none of"
                " the hosts this source is read from"
            )
        return url

    def _check_status(self, response: httpx.Response) -> None:
        status = response.status_code
        if status < 300:
            return
        if status == 404:
            raise MissingError("HTTP 404: no such thing there")
        if status == 412:
            raise ChangedError("HTTP 412: another version than the one that was looked up")
        if status in _BUSY:
            after = retry_after_s(response.headers.get("retry-after"))
            asked = f", asks to wait {after:.0f} s" if after else ""
            raise TransientError(f"HTTP {status}{asked}", retry_after_s=after)
        words, hint = self._explain(status)
        if response.headers.get("x-error-code") == "RepoNotFound":  # the Hub's 401 without a token
            raise MissingError(f"HTTP {status}{words}", hint=hint or None)
        raise RefusedError(f"HTTP {status}{words}", hint=hint or None)

    @contextmanager
    def _failures(self, host: str) -> Iterator[None]:
        """Errors of the HTTP library in our words."""
        try:
            yield
        except httpx.ConnectTimeout:
            raise TransientError(
                f"no connection within {self._limits.connect_s:g} s", no_contact=True
            ) from None
        except httpx.ConnectError as error:
            raise TransientError(f"no connection: {_first_line(error)}", no_contact=True) from None
        except httpx.TimeoutException:
            raise TransientError(f"sends nothing for {self._limits.stall_s:g} s") from None
        except httpx.HTTPError as error:
            raise TransientError(f"broke off: {_first_line(error)}") from None
        except (httpx.InvalidURL, UnicodeError):
            raise RefusedError(f"{quoted(host)} is no host") from None


def check_endpoint(text: str, setting: str) -> str:
    """The endpoint URL without trailing slashes. Raises FetchError naming `setting`."""
    try:
        url = httpx.URL(text)
        good = url.scheme in ("http", "https") and bool(url.host)
        good = good and not url.userinfo and not url.query and not url.fragment
    except (httpx.InvalidURL, ValueError):
        good = False
    if not good:
        raise FetchError(f"{setting}: expected http:// or https://, a host and nothing secret")
    return text.rstrip("/")


def _origin(url: httpx.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80)


def _refuse_metadata(url: httpx.URL) -> None:
    """Refuse hosts that resolve to where a cloud keeps the machine's credentials."""
    try:
        found = socket.getaddrinfo(url.host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # a proxy may know it; if nobody does, the connection says so
    for *_, address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        mapped = getattr(ip, "ipv4_mapped", None)
        if (mapped or ip).is_link_local or (mapped or ip) in _METADATA:
            raise RefusedError(f"{quoted(url.host)} is a link-local or metadata address")


def retry_after_s(text: str | None) -> float | None:
    """Seconds of a Retry-After header, a number or a date."""
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) < 9:
        return float(text)
    try:
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return quoted(lines[0])[1:-1] if lines else type(error).__name__


def _shut(stream: Any) -> None:
    connection = stream.get_extra_info("socket")
    if connection is not None:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # reads 150 certificates: once a process
