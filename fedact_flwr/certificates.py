"""Certificates and keys of a federation: TLS for the SuperLink, and a key by which it knows each SuperNode.

In one folder: ca.crt and ca.key, the authority that signs; superlink.crt and superlink.key; NODE.key and NODE.pub of
each node. Everyone gets ca.crt; each .key stays where it is used.
"""

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedact_flwr.settings import SettingsError

CURVE = ec.SECP384R1()  # one of those that Flower takes for its nodes
CA_DAYS = 3650
ALWAYS = ("localhost", "127.0.0.1")  # a user on the SuperLink's own machine
OUR_NAMES = ("ca", "superlink")
HOST_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)
NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def write_certificates(folder: Path, hosts: Sequence[str], nodes: Sequence[str], days: int) -> list[Path]:
    """Write a certificate for ``hosts``, where there are some, and a key pair for each of ``nodes``.

    The authority is made the first time and used from then on. A certificate replaces the one before it, since that is
    how it is renewed; a node's key is never replaced. ``days`` is how long the certificate holds. Returns what was
    written. Raises `SettingsError`.
    """
    if not hosts and not nodes:
        raise SettingsError("certs: nothing to make; name the SuperLink's hosts with --host, or nodes with --node")
    names = [_host_name(host) for host in dict.fromkeys((*hosts, *ALWAYS))]
    for node in nodes:
        if not NODE_NAME.fullmatch(node) or node in OUR_NAMES:
            raise SettingsError(
                f"--node {node}: allowed are up to 64 letters, digits, '.', '-' and '_', but not "
                f"{' and '.join(OUR_NAMES)}"
            )
    written = []
    try:
        for node in nodes:
            if (folder / f"{node}.key").exists() or nodes.count(node) > 1:
                raise SettingsError(f"--node {node}: its key is there already; allowed is a new name")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hosts:
            there = [name for name in ("ca.crt", "ca.key") if (folder / name).exists()]
            if len(there) == 1:
                raise SettingsError(
                    f"certs {folder}: it has {there[0]} and not the other of ca.crt and ca.key; allowed is both, or "
                    f"neither for a new authority"
                )
            if not there:
                written += _write_authority(folder)
            written += _write_superlink(folder, names, days)
        for node in nodes:
            key = ec.generate_private_key(CURVE)
            private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
            public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            written.append(_write(folder / f"{node}.key", private, secret=True))
            written.append(_write(folder / f"{node}.pub", public + f" {node}\n".encode()))
    except OSError as error:
        raise SettingsError(f"certs {folder}: {error}; allowed is a folder to write to") from None
    return written


def _write_authority(folder: Path) -> list[Path]:
    key = ec.generate_private_key(CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "FedACT federation")])
    usage = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "encipher_only", "decipher_only"), False,
    )  # fmt: skip
    certificate = (
        _builder(name, name, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
        .sign(key, hashes.SHA384())
    )
    return [_write_key(folder / "ca.key", key), _write(folder / "ca.crt", certificate.public_bytes(Encoding.PEM))]


def _write_superlink(folder: Path, names: Sequence[x509.GeneralName], days: int) -> list[Path]:
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        authority_key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
            raise ValueError("the key is of another kind")
        if authority_key.public_key() != authority.public_key():
            raise ValueError("the key is not the certificate's")
    except (ValueError, TypeError) as error:
        raise SettingsError(f"certs {folder}: its ca.crt and ca.key are none of ours: {error}") from None
    key = ec.generate_private_key(CURVE)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "superlink")])
    certificate = (
        _builder(subject, authority.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    return [
        _write_key(folder / "superlink.key", key),
        _write(folder / "superlink.crt", certificate.public_bytes(Encoding.PEM)),
    ]


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not HOST_NAME.fullmatch(host):
            raise SettingsError(f"--host {host}: allowed is a host's name or its IP address, without a port") from None
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    return _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), secret=True)


def _write(path: Path, content: bytes, secret: bool = False) -> Path:
    """Write the whole file or none, and a secret one for its owner's eyes alone from its first byte on."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    temporary.replace(path)
    return path
