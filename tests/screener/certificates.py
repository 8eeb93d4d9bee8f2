"""Certificates of an issuer of our own, for servers on loopback."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

PEM = serialization.Encoding.PEM
Key = ec.EllipticCurvePrivateKey


@dataclass
class Certificate:
    """Files of a server's certificate with its key, and of its issuer, whom clients have to trust."""

    server: Path
    issuer: Path

    @property
    def context(self) -> ssl.SSLContext:
        """A server on loopback speaks TLS with it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server)
        return context


def make_certificate(folder: Path) -> Certificate:
    """A certificate for 127.0.0.1 and localhost, and its issuer's."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    issuer = _signed("issuer", authority, authority, x509.BasicConstraints(ca=True, path_length=None))
    leaf = _signed("localhost", key, authority, x509.SubjectAlternativeName(names))
    private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "issuer.pem").write_bytes(issuer)
    (folder / "server.pem").write_bytes(private + leaf)
    return Certificate(folder / "server.pem", folder / "issuer.pem")


def _signed(name: str, key: Key, authority: Key, extension: x509.ExtensionType) -> bytes:
    subject, issuer = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in (name, "issuer"))
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(1)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - day).not_valid_after(now + day)
    for more, critical in (
        (extension, isinstance(extension, x509.BasicConstraints)),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
    ):
        builder = builder.add_extension(more, critical)
    return builder.sign(authority, hashes.SHA256()).public_bytes(PEM)
