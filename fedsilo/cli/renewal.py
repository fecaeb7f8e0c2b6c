"""Renewal: a request with the keys that are there. An audit log and other sites' pins know a party by its signing key.

What the folder holds is compared with the token first, since a person and a daemon may share a name and a folder: a
token for `operator/hospital_a` must not be answered with the daemon's keys (threat T31). Not judged: whether the old
certificate is still good, which is why somebody renews, and who issued it, which the authority knows.
"""

from __future__ import annotations

from pathlib import Path

from certs.encoding import load_signing_key, load_tls_key, read_one_certificate
from certs.enrolment import identity_of_token, make_request
from certs.identity import named_in
from fedsilo.demo.provision import Enrolment
from fedsilo.files.durable import read_private, write_durably
from fedsilo.files.identity_files import read_public
from fedsilo.protocol.errors import NotAllowedError, NotFoundError

_ENROL = "enrol with new keys: `fedsilo certs request`"


def renew(directory: Path, token: str) -> Enrolment:
    """Write `<name>.request.json` for the identity of `token`, made with its keys in `directory`.

    Raises:
        UsageError: not a token.
        NotFoundError: no certificate or key of that name.
        NotAllowedError: the certificate there is another identity's, a key is not the certificate's, or others may
            read it.
    """
    identity = identity_of_token(token)
    certificate, key, signing, request = (
        directory / f"{identity.name}{end}" for end in (".crt", ".key", ".ed25519", ".request.json")
    )
    try:
        pem = read_public(certificate)
    except NotFoundError as error:
        raise NotFoundError(f"{error.message}: nothing is there to renew", hint=_ENROL) from error
    held, held_signing_key = named_in(pem)
    if held != identity:
        raise NotAllowedError(
            f"{certificate} is the certificate of {held}, the token is for {identity}",
            hint="use the folder with that identity's keys, or ask for a token for this one",
        )
    tls_key = load_tls_key(read_private(key))
    if read_one_certificate(pem, what=str(certificate)).public_key() != tls_key.public_key():
        raise NotAllowedError(f"{key} does not match {certificate}", hint=_ENROL)
    signing_key = None
    if held_signing_key is not None:
        signing_key = load_signing_key(read_private(signing))
        if signing_key.public_key() != held_signing_key:
            raise NotAllowedError(f"{signing} is not the key that {certificate} certifies", hint=_ENROL)
    # Private: whoever reads the token in it could enrol first.
    write_durably(request, make_request(tls_key=tls_key, signing_key=signing_key, token=token), 0o600)
    return Enrolment(identity, request, key, None if signing_key is None else signing)
