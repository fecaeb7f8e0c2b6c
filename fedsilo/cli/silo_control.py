"""What every `silo` command shares: which site, its control socket, and commands signed with a person's key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.protocol.errors import NotFoundError

if TYPE_CHECKING:
    from fedsilo.control.client import ControlClient
    from silo.config import SiloConfig

CONFIG_DEFAULT = Path("silo.yaml")
ConfigOption = Annotated[Path, typer.Option("--config", help="The site's configuration file.")]
OperatorOption = Annotated[
    str, typer.Option("--operator", help="Who signs: id/NAME.crt and id/NAME.key beside the site's own certificate.")
]
RequestOption = Annotated[
    str, typer.Option("--request-id", help="Give the same again to repeat a request without doing it twice.")
]


def load_site(path: Path) -> SiloConfig:
    from silo.config import load_config

    return load_config(path)


def client_of(config: SiloConfig) -> ControlClient:
    from fedsilo.control.client import ControlClient

    return ControlClient(config.control.socket)


def command(config: SiloConfig, operator: str, name: str, arguments: Mapping[str, Any], request_id: str) -> Any:
    """Carry out a command as a person; what the daemon answered."""
    from fedsilo.control.client import Operator, sign_as

    folder = config.identity.certificate.parent
    if not (folder / f"{operator}.crt").exists():
        keys = (path.stem for path in folder.glob("*.key"))
        people = ", ".join(sorted(name for name in keys if name != config.silo and (folder / f"{name}.crt").exists()))
        raise NotFoundError(
            f"{folder / operator}.crt does not exist", hint=f"there are keys of: {people or 'nobody'} (--operator NAME)"
        )
    person = Operator(config.silo, folder / f"{operator}.crt", folder / f"{operator}.key", config.federation)
    signed = sign_as(person, name, arguments, request_id=request_id)
    with client_of(config) as client:
        return client.execute(signed)
