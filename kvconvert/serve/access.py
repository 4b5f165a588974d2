"""Who may ask: the names under which the server is asked for, pages of other origins, and API keys."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.types import Scope

from kvconvert.errors import UsageError
from kvconvert.serve.places import network
from kvconvert.serve.refusal import Refusal

ANY = "*"
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::[0-9]*)?")
_ABSOLUTE = re.compile(rb"https?://([^/]+)(/?.*)", re.IGNORECASE)


def in_origin_form(scope: Scope) -> Scope:
    """A request that names its target as a whole, as to a proxy, as what every server has to take it for (RFC 9112,
    3.2.2): a path here, and the host, whatever the header says.
    """
    absolute = _ABSOLUTE.fullmatch(scope["raw_path"])
    if absolute is None:
        return scope
    host, path = absolute.groups()
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    path = path or b"/"
    return {**scope, "raw_path": path, "path": unquote(path.decode("ascii")), "headers": [(b"host", host), *headers]}


@dataclass(frozen=True)
class Hosts:
    """Names and addresses under which a server may be asked for.

    A web page may let its own name mean this machine, and then asks as if it came from here; but it asks for its name.

    Attributes:
        names: in small letters; `*` allows all.
        any_address: whether any address is one of them, as where all of a machine's are served.
    """

    names: frozenset[str] = frozenset({"localhost", "127.0.0.1", "::1"})
    any_address: bool = False

    @classmethod
    def of(cls, host: str, address: str, further: Collection[str] = ()) -> Hosts:
        """Those of a server.

        Args:
            host: that was asked for.
            address: on which the server listens.
            further: names that a proxy, or the network, has for it; a port is left out.

        Raises:
            UsageError: one of them is no name.
        """
        for name in further:
            if "/" in name or not _name(name):
                raise UsageError(f"`allowed_hosts` {name!r:.100} is no name of a host; give one such as proxy.example.")
        parsed = ipaddress.ip_address(address.partition("%")[0])
        names = {host.lower(), str(parsed)} - {ANY} | {*map(_name, further)}  # `*` may be a host to listen on
        if parsed.is_loopback or parsed.is_unspecified:
            names |= cls.names
        if parsed.is_unspecified:
            names.add(socket.gethostname().lower())
        return cls(frozenset(names), parsed.is_unspecified)

    def allow(self, header: str) -> bool:
        """Whether a request's Host is one of them."""
        return ANY in self.names or self.named(header)

    def named(self, header: str) -> bool:
        """The same without a `*`: with it, a web page may have any name."""
        name = _name(header)
        if name in self.names:
            return True
        try:
            return self.any_address and bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _name(host: str) -> str:
    """The name or address in a Host, which may have a port; empty where it is none."""
    name = host.strip().lower()
    if name.count(":") > 1 and not name.startswith("["):  # an IPv6 address as people write it
        return name
    found = _HOST.fullmatch(name)
    return (found[1] or found[2] or "").rstrip(".") if found else ""


def origin_of(stated: str) -> str:
    """An origin as browsers write it (UsageError: it is none)."""
    origin = stated.strip().lower().removesuffix("/")
    if origin not in (ANY, "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
        message = f"--cors-origin {stated!r:.100} is no origin of web pages; give one such as http://localhost:3000."
        raise UsageError(message)
    return origin


class Access:
    """What is asked of a request before it is read.

    Args:
        keys: of which a client has to send one; anyone is served where there are none.
        hosts: under which the server is asked for.
        origins: of web pages that may ask; `*` allows all.
    """

    def __init__(self, keys: Collection[str], hosts: Hosts, origins: Collection[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._hosts, self._origins = hosts, frozenset(origins)

    def check_page(self, scope: Scope) -> None:
        """Refuse what another web page asks (Refusal)."""
        headers = dict(scope["headers"])
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        if host and not self._hosts.allow(host):
            message = f"This server is not asked for as {host!r:.100}; --allowed-host names further hosts."
            raise Refusal(403, message, code="host_not_allowed")
        own = self._hosts.named(host) and origin.partition("://")[2] == host  # the server's own page
        if b"origin" in headers and not own and not {origin, ANY} & self._origins:
            message = f"Pages of {origin!r:.100} may not ask this server; --cors-origin names those that may."
            raise Refusal(403, message, code="origin_not_allowed")

    def client(self, scope: Scope) -> bytes:
        """Who asks, as what tells clients apart: the digest of a key, or the address (Refusal: the key is wrong)."""
        if not self._digests:
            return network((scope.get("client") or ("",))[0]).encode()
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, in constant time.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if kind.lower() != b"bearer" or not any(matches):
            message = "Send a valid API key as `Authorization: Bearer KEY`."
            raise Refusal(401, message, code="invalid_api_key")
        return digest
