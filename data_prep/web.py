"""Addresses and what servers answer: which are taken, and what each failure means for the next try."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from segspeed.types import DataError, first_line

CHUNK = 1 << 18
MAX_DIGITS = 18  # of a length in bytes
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # answers that a later try may not get


@dataclass(frozen=True)
class Remote:
    """A file on a server, the name it gets here, and the checksums it must have (lower-case hexadecimal)."""

    url: str
    name: str
    sha256: str | None = None
    md5: str | None = None

    @property
    def shown(self) -> str:
        """The address without its query: signed addresses carry a key there."""
        return self.url.split("?")[0].split("#")[0]


class Broken(Exception):
    """This try failed; another may not. ``wait``: what the server asked for, in s."""

    def __init__(self, text: str, wait: float | None = None) -> None:
        super().__init__(text)
        self.wait = wait


class NoName(Broken):
    """The server's name has no address."""


class Changed(Exception):
    """What lies here belongs to another version of the file: begin anew."""


def check_address(url: str) -> None:
    """Raises DataError unless ``url`` is an http or https address without a password in it."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises for nonsense
    except ValueError as error:
        raise DataError(f"{url}: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise DataError(
            f"{url.split('?')[0]}: only http and https are fetched. An archive that is here already: put it into the out folder "
            "under its own name; with its checksum it is used as it is"
        )
    if not parts.hostname or re.search(r"[\s\x00-\x1f]", url):
        raise DataError(f"{url!r} is no address: it needs a host, and spaces are written %20")
    if parts.username is not None or parts.password is not None:
        raise DataError(
            f"the address on {parts.hostname} holds a user name or password, which would stay in the shell's history "
            "and in logs; fetch it with another program and put it into the out folder"
        )


def file_name(url: str) -> str:
    """The last part of an address as a plain file name. Raises DataError when there is none."""
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    if not name.strip(". ") or re.search(r"[/\\\0:]", name) or name.startswith(".") or len(name.encode()) > 200:
        raise DataError(f"{url} does not end in a file name; give one with name=...")
    return name


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Other addresses are followed to http and https only, and never from https to http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        check_address(newurl)
        if req.type == "https" and urlsplit(newurl).scheme != "https":
            raise DataError(f"{req.full_url.split('?')[0]} leads on to an address without https, which is not followed")
        return super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302  # Python 3.10 does not know it


def _opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()  # without those for file:, ftp: and data:
    for handler in (
        urllib.request.ProxyHandler, urllib.request.UnknownHandler, urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler, urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPErrorProcessor, _Redirects,
    ):  # fmt: skip
        opener.add_handler(handler())
    return opener


def open_address(remote: Remote, headers: dict[str, str], timeout: float) -> Any:
    """The server's answer within ``timeout`` seconds. Raises Broken for what may pass, Changed for a range it does not have,
    DataError."""
    try:
        return _opener().open(urllib.request.Request(remote.url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and "Range" in headers:
            raise Changed from error
        if error.code in TRANSIENT:
            after = error.headers.get("Retry-After", "")
            wait = float(after) if after.isdecimal() else None
            raise Broken(f"the server answered {error.code} ({error.reason})", wait) from error
        raise DataError(f"{remote.shown}: {_refusal(error)}") from error
    except (http.client.HTTPException, OSError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        host = urlsplit(remote.url).hostname
        if isinstance(cause, socket.gaierror):
            raise NoName(
                f"the name {host} cannot be resolved: misspelt, no network, or a proxy is needed (HTTPS_PROXY)"
            ) from error
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise DataError(
                f"{remote.shown}: the certificate of {host} is not trusted ({cause.verify_message}). Where a proxy signs "
                "connections anew, set SSL_CERT_FILE to the file with its certificate"
            ) from error
        text = first_line(cause) if isinstance(cause, BaseException) else str(cause)
        raise Broken(f"no connection to {host} ({text})") from error
    except DataError:
        raise
    except ValueError as error:  # urllib says so of a redirection that cannot be read
        raise DataError(
            f"{remote.shown}: this address, or one that the server leads on to, is none ({first_line(error)})"
        ) from error


def _refusal(error: urllib.error.HTTPError) -> str:
    if error.code in (404, 410):
        return f"there is no such file on the server ({error.code}); compare the address"
    if error.code in (401, 403):
        return f"the server does not give it without a login or permission ({error.code})"
    return f"the server answered {error.code} ({first_line(error)})"


def validator(headers: Any) -> str | None:
    """What If-Range may carry: a strong ETag, else the date of the last change."""
    tag = headers.get("ETag")
    if tag and not tag.startswith("W/"):
        return str(tag)
    return headers.get("Last-Modified")


def content_length(answer: http.client.HTTPResponse, remote: Remote) -> int | None:
    """Bytes that are to come; None when the server does not say. Raises DataError for a length that no file has."""
    text = answer.headers.get("Content-Length", "")
    if len(text) > MAX_DIGITS:
        raise DataError(
            f"{remote.shown}: the server says a length of {len(text)} digits, which no file has: {text[:20]}..."
        )
    return int(text) if text.isdecimal() else None


def chunks(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """The bytes of an answer, block by block. Raises Broken when the connection ends before they do."""
    try:
        while chunk := answer.read(CHUNK):
            yield chunk
    except (
        http.client.HTTPException,
        OSError,
        ValueError,
        OverflowError,
    ) as error:  # the latter two: sizes of nonsense
        raise Broken(f"the connection broke ({first_line(error)})") from error
