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


@dataclass
class Certificate:
    """Files of a server's certificate with its key, and of its issuer, whom clients have to trust."""

    server: Path
    issuer: Path

    @property
    def context(self) -> ssl.SSLContext:
        """What a server on loopback speaks TLS with."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server)
        return context


def make_certificate(folder: Path) -> Certificate:
    """A certificate for 127.0.0.1 and localhost, and its issuer's."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = _made("issuer", "issuer", authority, authority).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    leaf = _made("localhost", "issuer", key, authority).add_extension(
        x509.SubjectAlternativeName(names), critical=False
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "issuer.pem").write_bytes(issuer.sign(authority, hashes.SHA256()).public_bytes(pem))
    (folder / "server.pem").write_bytes(private + leaf.sign(authority, hashes.SHA256()).public_bytes(pem))
    return Certificate(folder / "server.pem", folder / "issuer.pem")


def _made(
    name: str, issuer: str, key: ec.EllipticCurvePrivateKey, authority: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    subject, by = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in (name, issuer))
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    )
