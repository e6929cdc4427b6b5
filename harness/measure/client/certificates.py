"""Which servers are trusted over https: those of the system's authorities, or of those in SSL_CERT_FILE."""

from __future__ import annotations

import ssl
from functools import cache


def trusting_context(url: str) -> ssl.SSLContext:
    """What checks certificates and names of hosts, made once for the same files; of http nothing, which costs nothing.

    It offers HTTP/1.1 alone.
    """
    is_https = url[:6].lower() == "https:"
    return _context(ssl.get_default_verify_paths()) if is_https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@cache
def _context(_paths: ssl.DefaultVerifyPaths) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
