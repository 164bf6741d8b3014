"""Certificates in files: their contents and their defects.

Reads and validates. It creates no certificate and opens no connection. Needs the package
cryptography.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from streammeta.tls.identity import IdentityError, Principal, principal_of
from streammeta.tls.secret_files import is_open_to_others


class CertificateError(Exception):
    """Invalid file. The message names the file and the expected content."""


def read_certificates(path: Path) -> Sequence[x509.Certificate]:
    """Return the certificates of a PEM file, at least one, in their order.

    Raises:
        CertificateError: the file is unreadable, or contains no certificate.
    """
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CertificateError(
            f"{path}: {_explain(error)}, must contain one or more certificates, as PEM"
        ) from error


def read_key(path: Path) -> PrivateKeyTypes:
    """Return the private key in a PEM file.

    Raises:
        CertificateError: the file is unreadable, contains no key or an encrypted one, or others
            than the owner may read it.
    """
    try:
        data, status = path.read_bytes(), path.stat()
    except OSError as error:
        raise CertificateError(f"{path}: {_explain(error)}, must contain a private key") from error

    # Checked first: a key that others could read is not a secret, whatever the file contains.
    if is_open_to_others(status):
        mode = stat.S_IMODE(status.st_mode)
        raise CertificateError(
            f"{path}: mode {mode:04o} allows other users to read the key. Run `chmod 600 {path}`"
        )

    try:
        # No password, because controllers start unattended.
        return serialization.load_pem_private_key(data, password=None)
    except (TypeError, ValueError) as error:
        raise CertificateError(
            f"{path}: {_explain(error)}, must contain one private key, as PEM, without a password"
        ) from error


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """Contents of a certificate, and `problems`: all its defects."""

    name: str
    """The subject's common name, for people."""
    principal: Principal | None
    is_authority: bool
    hosts: tuple[str, ...]
    """DNS names and addresses of the holder."""
    not_before: datetime
    not_after: datetime
    fingerprint: str
    """SHA-256 of the certificate, hexadecimal."""
    serial: str
    """Serial number assigned by its authority, hexadecimal."""
    problems: tuple[str, ...]

    def days_left(self, now: datetime) -> int:
        """Return the whole days until it expires, negative afterwards."""
        return (self.not_after - now).days


def describe(
    certificate: x509.Certificate,
    now: datetime,
    *,
    authorities: Sequence[x509.Certificate] = (),
    key: PrivateKeyTypes | None = None,
) -> CertificateFacts:
    """Return the contents of a certificate, validated at `now`.

    With `authorities`, one of them must have signed it. With `key`, the certificate must belong to
    it.
    """
    names = _alternative_names(certificate)
    principal, problems = None, []
    is_authority = _is_authority(certificate)

    # An authority only signs and has no identity of its own.
    if not is_authority:
        try:
            principal = principal_of(names.get_values_for_type(x509.UniformResourceIdentifier))
        except IdentityError as error:
            problems.append(f"contains no identity: {error}")
        problems.extend(_missing_usages(certificate))

    if authorities and not any(_is_signed_by(certificate, authority) for authority in authorities):
        problems.append("was signed by another authority")
    if key is not None and key.public_key() != certificate.public_key():
        problems.append("does not belong to the key")
    not_before, not_after = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < not_before:
        problems.append(f"is not valid before {not_before:%Y-%m-%d %H:%M} UTC: check the clock")
    if now > not_after:
        problems.append(f"expired at {not_after:%Y-%m-%d %H:%M} UTC")
    return CertificateFacts(
        name=_common_name(certificate),
        principal=principal,
        is_authority=is_authority,
        hosts=(
            *names.get_values_for_type(x509.DNSName),
            *map(str, names.get_values_for_type(x509.IPAddress)),
        ),
        not_before=not_before.astimezone(UTC),
        not_after=not_after.astimezone(UTC),
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
        serial=f"{certificate.serial_number:x}",
        problems=tuple(problems),
    )


def serial_of(certificate: bytes) -> int:
    """Return the serial number of a certificate in DER form.

    Raises:
        CertificateError: the bytes are not a certificate.
    """
    try:
        return x509.load_der_x509_certificate(certificate).serial_number
    except ValueError as error:
        raise CertificateError("is damaged, must be a certificate, as DER") from error


def validate(certificate: bytes, ca: bytes, now: datetime) -> CertificateFacts:
    """Return the facts of the first certificate of a PEM text, validated with the CAs in `ca`.

    Further certificates may be intermediate authorities between it and those in `ca`.

    Raises:
        CertificateError: no authority in `ca` is valid at `now`, or a text contains no certificate.
    """
    try:
        leaf, *between = x509.load_pem_x509_certificates(certificate)
        bundle = x509.load_pem_x509_certificates(ca)
    except ValueError as error:
        raise CertificateError("is damaged, must contain certificates, as PEM") from error

    # During a rotation, a bundle may still contain expired authorities.
    authorities = [certificate for certificate in bundle if _may_sign(certificate, now)]
    if not authorities:
        raise CertificateError("contains no authority that is valid now")
    # Each round proves at least one more link of a chain, in whichever order they are given.
    for _ in between:
        authorities += [
            certificate
            for certificate in between
            if certificate not in authorities
            and _may_sign(certificate, now)
            and any(_is_signed_by(certificate, known) for known in authorities)
        ]

    return describe(leaf, now, authorities=authorities)


def _may_sign(certificate: x509.Certificate, now: datetime) -> bool:
    is_valid = certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
    return is_valid and _is_authority(certificate)


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName(())


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _missing_usages(certificate: x509.Certificate) -> list[str]:
    try:
        usages = set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return []  # good for everything
    wanted = {
        "client authentication": ExtendedKeyUsageOID.CLIENT_AUTH,
        "server authentication": ExtendedKeyUsageOID.SERVER_AUTH,
    }
    return [f"was not issued for {use}" for use, usage in wanted.items() if usage not in usages]


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    # Other names, kinds of keys and algorithms raise TypeError or ValueError.
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _explain(error: Exception) -> str:
    return (
        (error.strerror or str(error)) if isinstance(error, OSError) else "is damaged, or not PEM"
    )
