"""`fedact certs`: what it makes is accepted by those who check it, and what is there is never lost."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner, Result

from fedact_flwr.cli import app


def certs(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["certs", *map(str, arguments)])


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_certificate_is_the_authoritys_for_all_names(tmp_path: Path) -> None:
    result = certs(tmp_path / "certs", "--host", "link.example.org", "--host", "10.0.0.5", "--days", "30")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "certs"
    link, authority = certificate(folder / "superlink.crt"), certificate(folder / "ca.crt")
    link.verify_directly_issued_by(authority)
    names = link.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["link.example.org", "localhost"]
    addresses = [ipaddress.ip_address(address) for address in ("10.0.0.5", "127.0.0.1")]
    assert names.get_values_for_type(x509.IPAddress) == addresses
    left = link.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=29) < left < timedelta(days=30, minutes=1)
    key = load_pem_private_key((folder / "superlink.key").read_bytes(), None)
    assert key.public_key() == link.public_key()


def test_a_nodes_keys_belong_together_and_are_secret(tmp_path: Path) -> None:
    assert certs(tmp_path / "certs", "--node", "site-a").exit_code == 0
    private = load_ssh_private_key((tmp_path / "certs" / "site-a.key").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "certs" / "site-a.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.public_key() == public
    assert (tmp_path / "certs" / "site-a.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "certs").stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "certs" / "ca.key").exists()  # keys need no authority


def test_renewal_keeps_the_authority_and_the_nodes(tmp_path: Path) -> None:
    assert certs(tmp_path, "--host", "a", "--node", "n").exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert certs(tmp_path, "--host", "b").exit_code == 0
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {"superlink.crt", "superlink.key"}
    certificate(tmp_path / "superlink.crt").verify_directly_issued_by(certificate(tmp_path / "ca.crt"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to make; name the SuperLink's hosts with --host, or nodes with --node"),
        (("--host", "a:8000"), "--host a:8000: allowed is a host's name or its IP address, without a port"),
        (("--node", "../x"), "--node ../x: allowed are up to 64 letters"),
        (("--node", "ca"), "--node ca: allowed are up to 64 letters"),
        (("--node", "n" * 300), "allowed are up to 64 letters"),
        (("--node", "new", "--node", "new"), "--node new: its key is there already; allowed is a new name"),
        (("--node", "old"), "--node old: its key is there already; allowed is a new name"),
    ],
)
def test_wrong_arguments_change_nothing(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert certs(tmp_path, "--host", "a", "--node", "old").exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result = certs(tmp_path, *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("missing", ["ca.crt", "ca.key"])
def test_half_an_authority_is_never_replaced(missing: str, tmp_path: Path) -> None:
    assert certs(tmp_path, "--host", "a").exit_code == 0
    (tmp_path / missing).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result = certs(tmp_path, "--host", "b")
    assert result.exit_code == 2
    assert "and not the other of ca.crt and ca.key" in result.output
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_authoritys_key_is_refused(tmp_path: Path) -> None:
    assert certs(tmp_path / "ours", "--host", "a").exit_code == 0
    assert certs(tmp_path / "theirs", "--host", "a").exit_code == 0
    before = (tmp_path / "ours" / "superlink.crt").read_bytes()
    (tmp_path / "ours" / "ca.key").write_bytes((tmp_path / "theirs" / "ca.key").read_bytes())
    result = certs(tmp_path / "ours", "--host", "b")
    assert result.exit_code == 2
    assert "the key is not the certificate's" in result.output
    assert (tmp_path / "ours" / "superlink.crt").read_bytes() == before


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = certs(tmp_path / "file" / "certs", "--node", "n")
    assert result.exit_code == 2
    assert "allowed is a folder to write to" in result.output
