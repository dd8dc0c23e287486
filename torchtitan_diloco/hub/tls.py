"""Certificates: the hub's own, and how islands check it. Nothing is ever accepted unchecked."""

import ssl

from torchtitan_diloco.errors import UserError


def check_certificate(cert: str, key: str) -> None:
    """Raises UserError, naming the setting, unless a hub can serve https with these two PEM files (key "": in cert)."""
    if not cert:
        if key:
            raise UserError(
                "syncer.key: a key is of no use without syncer.cert; give the certificate as well"
            )
        return
    for setting, path in (("syncer.cert", cert), ("syncer.key", key)):
        if path:
            _require_readable(setting, path)
    encrypted = False

    def password() -> str:
        nonlocal encrypted
        encrypted = True
        return ""

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key or None, password)
    except ssl.SSLError as error:
        named = f"syncer.key: {key}" if key else f"syncer.cert: {cert}"
        if encrypted:
            message = f"{named} has a passphrase, which nobody could type; take it off with `openssl pkey`"
        elif error.reason == "KEY_VALUES_MISMATCH":
            message = (
                f"{named} holds the key of another certificate than {cert}; give the one that belongs to it"
            )
        else:
            message = f"syncer.cert: {cert} and {named} are no certificate and key ({_reason(error)}); give PEM files"
        raise UserError(message) from None


def client_context(ca_file: str) -> ssl.SSLContext:
    """How an island checks the hub. Raises UserError naming transport.ca_file."""
    if not ca_file:
        return ssl.create_default_context()
    _require_readable("transport.ca_file", ca_file)
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise UserError(
            f"transport.ca_file: {ca_file} holds no certificate ({_reason(error)}); give the PEM file of the hub's authority"
        ) from None


def distrust(error: BaseException | None, url: str, ca_file: str) -> UserError | None:
    """What to tell the user where a request has failed because the certificate does not convince; waiting does not help."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            checked = ca_file or "the system's authorities"
            return UserError(
                f"transport.ca_file: the certificate of {url} does not hold against {checked} ({error.verify_message}); give "
                "the file of the authority that signed the hub's certificate, and an address that is named in it"
            )
        error = error.__cause__ or error.__context__
    return None


def _require_readable(setting: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise UserError(
            f"{setting}: {path} cannot be read ({error.strerror}); correct the path or its rights"
        ) from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
