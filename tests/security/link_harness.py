"""One site with the files of both ends of its guard-trainer link, and everybody who should not get onto it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from certs.authority import CertificateAuthority, create_ca
from certs.encoding import load_tls_key, private_key_pem
from certs.names import LinkRole
from fedsilo.demo import provision
from fedsilo.files.durable import write_private
from silo.link import GUARD_SAYS, Link
from silo.link_tls import LinkFiles, TlsStream
from tests.security.people import CLIENT, forge, new_keys

NOW = datetime.now(UTC)
EXAMPLE = Path(__file__).parents[2] / "examples" / "hospital_a.yaml"
TRAINER = "spiffe://hospital_a/trainer/trainer"


class Site:
    """One site CA with a guard's and a trainer's files, and whatever certificate an attacker wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        provision.init_ca(folder / "ca", name="hospital_a", kind="site", now=NOW - timedelta(days=30))
        self.authority = provision.open_ca(folder / "ca")
        for place, role in (("id", "guard"), ("theirs", "trainer")):
            provision.enrol(folder / "ca", folder / place, f"{role}/{role}")
            shutil.copy(folder / "ca" / "ca.crt", folder / place / "site_ca.crt")
        self.guard_files, self.trainer_files = self.files("id", "guard"), self.files("theirs", "trainer")

    def files(self, place: str, name: str) -> LinkFiles:
        home = self.folder / place
        return LinkFiles(home / f"{name}.crt", home / f"{name}.key", home / "site_ca.crt")

    def stranger(self, certificate: bytes, key: ec.EllipticCurvePrivateKey) -> LinkFiles:
        """Files with any content, as somebody holds them who skips his own checks."""
        home = Path(tempfile.mkdtemp(dir=self.folder))
        (home / "x.crt").write_bytes(certificate)
        write_private(home / "x.key", private_key_pem(key))
        (home / "site_ca.crt").write_bytes(self.authority.certificate_pem)
        return LinkFiles(home / "x.crt", home / "x.key", home / "site_ca.crt")


def careless_trainer(port: int, files: LinkFiles | None, site: Site, **versions: ssl.TLSVersion) -> Link:
    """Dials as a trainer does, with any certificate or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(site.guard_files.site_ca)
    for name, version in versions.items():
        setattr(context, name, version)
    if files:
        context.load_cert_chain(files.certificate, files.key)
    stream = TlsStream(socket.create_connection(("127.0.0.1", port), 10), context, server_side=False, peer_role="guard")
    stream.shake_hands()
    return Link(stream, GUARD_SAYS)


@contextlib.contextmanager
def taken_port() -> Iterator[tuple[int, Callable[[], None]]]:
    """(port, function that frees it)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1], server.close


def free_port() -> int:
    with taken_port() as (port, _):
        return int(port)


def write_config(folder: Path, *changes: tuple[str, str]) -> Path:
    text = EXAMPLE.read_text()
    for old, new in (("state_dir: /var/lib/fedsilo/hospital_a", f"state_dir: {folder}/state"), *changes):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "hospital_a.yaml"
    path.write_text(text)
    return path


EXTERNAL = ("  launch: child\n  # unix:PATH", "  launch: external\n  # unix:PATH")  # the trainer's, not a server's
LINK = (
    "  # link_certificate: id/guard.crt\n  # link_key: id/guard.key",
    "  link_certificate: id/guard.crt\n  link_key: id/guard.key",
)


def at(address: str) -> tuple[str, str]:
    return '  address: "unix:run/trainer.sock"', f'  address: "{address}"'


def _issued(
    authority: CertificateAuthority | None, role: str, age: timedelta = timedelta(0)
) -> Callable[[Site], LinkFiles]:
    def make(site: Site) -> LinkFiles:
        key, _, keys = new_keys(signing=role == "silo")
        vouches, now = authority or site.authority, NOW - age
        if role == "silo":
            issued = vouches.issue(keys, "silo", "hospital_a", now=now)
        elif role == "operator":
            issued = vouches.issue(keys, "operator", "alice", now=now)
        else:
            link_role: LinkRole = "guard" if role == "guard" else "trainer"
            issued = vouches.issue(keys, link_role, "trainer", now=now)
        return site.stranger(issued.certificate_pem, key)

    return make


def _forged(*uris: str) -> Callable[[Site], LinkFiles]:
    def make(site: Site) -> LinkFiles:
        key = new_keys()[0]
        return site.stranger(forge(site.authority, uris=uris, usage=[CLIENT], key=key, now=NOW, signing_key=False), key)

    return make


def _own_key(site: Site) -> LinkFiles:
    key = load_tls_key(site.guard_files.key.read_bytes())
    pem = forge(site.authority, uris=[TRAINER], key=key, now=NOW, signing_key=False)
    return site.stranger(pem, key)


FEDERATION = create_ca("cardio-net", kind="federation", not_before=NOW - timedelta(days=30), days=60)
OTHER_SITE = create_ca("hospital_a", kind="site", not_before=NOW - timedelta(days=30), days=60)
REFUSED: dict[str, tuple[Callable[[Site], LinkFiles | None], str, str]] = {
    "no certificate": (lambda site: None, "presented no certificate", "got no certificate"),
    "another site's CA": (_issued(OTHER_SITE, "trainer"), "wrong CA", "wrong CA"),
    "the federation's CA": (_issued(FEDERATION, "silo"), "wrong CA", "wrong CA"),
    "expired": (_issued(None, "trainer", timedelta(days=8)), "expired", "expired"),
    "an operator": (_issued(None, "operator"), "wrong role: .*operator/alice", "wrong role: .*operator/alice"),
    "a guard": (_issued(None, "guard"), "certificate of the trainer: .*purpose", "refuses this end's certificate"),
    "two names": (_forged(TRAINER, "spiffe://hospital_a/operator/eve"), "2 URI names", "2 URI names"),
    "no name": (_forged(), "no URI name", "no URI name"),
    "another domain": (_forged("spiffe://hospital_b/trainer/trainer"), "trust domain", "trust domain"),
    "another trainer": (_forged(TRAINER + "2"), "named 'trainer'", "named 'trainer'"),
    "the guard's own key": (_own_key, "uses a key of the guard", "uses a key of the guard"),
}
