"""TLS of listeners and of calls, from files that the configuration names. TLS 1.2 or newer."""

from __future__ import annotations

import ssl

from shared.errors import ConfigError


def server_context(section: str, cert: str, key: str, client_ca: str) -> ssl.SSLContext | None:
    """Of a listener; None: it speaks plainly.

    :param section: for messages, such as ``listen``: the keys are ``tls_cert`` and so on.
    :param cert: PEM file of the certificate and what leads to its authority.
    :param key: PEM file of its key, without a password.
    :param client_ca: PEM file; if given, clients need a certificate of this authority.
    :raises ConfigError: one is missing, or a file is of no use.
    """
    if not cert and not key:
        if client_ca:
            reason = f"needs {section}.tls_cert and {section}.tls_key"
            raise ConfigError(f"{section}.tls_client_ca", client_ca, reason)
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_pair(context, section, cert, key)
    if client_ca:
        _load_authority(context, f"{section}.tls_client_ca", client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(section: str, ca: str, cert: str, key: str) -> ssl.SSLContext | None:
    """Of calls to https addresses; None: as the system has it. Names are always checked.

    :param ca: PEM file of the only authority that is trusted; empty: those of the system.
    :param cert: PEM file of the certificate that is shown; empty: none is.
    :raises ConfigError: one is missing, or a file is of no use.
    """
    if not (ca or cert or key):
        return None
    context = ssl.create_default_context() if not ca else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca:
        _load_authority(context, f"{section}.tls_ca", ca)
    if cert or key:
        load_pair(context, section, cert, key)
    return context


def load_pair(context: ssl.SSLContext, section: str, cert: str, key: str) -> None:
    """Read certificate and key, also anew while connections are open: new ones show it.

    :raises ConfigError: one is missing, or a file is of no use.
    """
    if not cert or not key:
        name, other = ("tls_cert", "tls_key") if cert else ("tls_key", "tls_cert")
        raise ConfigError(f"{section}.{name}", cert or key, f"needs {section}.{other}")
    try:
        # Without a callback OpenSSL would ask for a password on the terminal.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{section}.tls_cert", cert, _why(error)) from None


def _load_authority(context: ssl.SSLContext, name: str, path: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except (OSError, ValueError) as error:
        raise ConfigError(name, path, _why(error)) from None


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"cannot be used: {error.reason or 'no PEM file that fits'}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "no PEM file that fits"
