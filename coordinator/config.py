"""The coordinator's configuration file (`coordinator.yaml`): closed schema, and where its paths point.

Unknown keys, duplicate keys and wrong types are errors with the line number (threat T35). Relative paths are taken
from the folder of the file. `expected` is what every silo must share: hashes, never data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedsilo.files.durable import read_regular
from fedsilo.grading.own_verifiers import OwnPartsVerifier
from fedsilo.protocol import strict_yaml
from fedsilo.protocol.errors import NotFoundError, UsageError
from fedsilo.protocol.plan import Name, Sha256, SiloModel

PORT_MAX = 65535
UNIX_PATH_BYTES_MAX = 107  # a unix socket's address is a C string of 108 bytes, the closing zero among them


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class IdentityFiles(_Closed):
    certificate: Path
    key: Path
    signing_key: Path
    federation_ca: Path
    site_ca: Path
    operators: Path  # roles.yaml: who may submit, start and abort runs here


class Expected(_Closed):
    """Hashes that a silo must have to join; a difference is refused with both values."""

    base_model: str = "base"  # a name for people, written into the adapter folder
    base_model_sha256: Sha256
    tokenizer_sha256: Sha256
    template_sha256: Sha256
    load: Literal["fp32", "bf16", "nf4", "fp8"] = "fp32"
    mixed_base: Literal["refuse", "allow"] = "refuse"
    # Of verifiers that packages bring at the silos, as `silo check` prints it; None: no silo brings one.
    own_verifiers_sha256: Sha256 | None = None
    mixed_verifiers: Literal["refuse", "allow"] = "refuse"
    lora_schema: Path  # JSON as `fedsilo policy schema make` writes it
    # Silos with another model: they join, and take part in runs whose method lets models differ (`responses-only`).
    models: dict[str, SiloModel] = Field(default_factory=dict)


class PublicFile(_Closed):
    """The coordinator's own copy of the public set, from which it checks answers."""

    path: Path
    sha256: Sha256
    verifier: OwnPartsVerifier  # no site's code is loaded here, and `code` is never run


class HeldOutFile(_Closed):
    sha256: Sha256  # the file itself stays with the silos


class Control(_Closed):
    """The local socket: reading for its group, changes only as signed commands."""

    socket: Path = Path("control.sock")
    group: str = "fedsilo-operators"


class Limits(_Closed):
    """Bounds of what one connection may take (threats T23, T24)."""

    receive_timeout_seconds: float = Field(120.0, gt=0)  # for each MiB, up or down; not for a whole payload
    poll_wait_seconds_max: float = Field(30.0, ge=0)
    concurrent_calls_per_silo: int = Field(4, ge=1)
    connection_age_seconds_max: int = Field(600, ge=1)  # T26: an expired certificate does not outlive it
    connection_idle_seconds_max: int = Field(60, ge=1)  # without a call; a poll that waits is one
    handshake_timeout_seconds: float = Field(10.0, gt=0)  # T24: from dialling to the end of TLS
    connections_max: int = Field(4096, ge=1)  # T24: of all callers together, also of those who never finish TLS


class CoordinatorConfig(_Closed):
    """`source` is the file it came from; all paths are absolute after `load_config`."""

    coordinator: Name = "main"
    federation: Name
    site: str = Field("", pattern=r"^([a-z][a-z0-9_-]{0,62})?$")  # empty: the coordinator's name
    listen: str = Field("127.0.0.1:8443", pattern=r"^(\[[0-9a-fA-F:]+\]|[^\s:]+):\d{1,5}$")  # port 0: any free one
    state_dir: Path
    identity: IdentityFiles
    charter: Path
    silos: tuple[Name, ...] = Field(min_length=1)  # roster order: aggregation follows it
    expected: Expected
    public: PublicFile
    held_out: HeldOutFile
    control: Control = Control()
    database: str = Field("", repr=False)  # sqlite or postgresql URL, maybe with a password; empty: SQLite in state_dir
    payloads: str = ""  # fsspec URL; empty: state_dir/blobs
    limits: Limits = Limits()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"  # of standard error
    source: Path = Field(Path(), exclude=True)  # not a key of the file

    @field_validator("listen")
    @classmethod
    def _port_exists(cls, value: str) -> str:
        if int(value.rpartition(":")[2]) > PORT_MAX:  # gRPC would take what is left of it after 65536
            raise ValueError(f"a port is 0 to {PORT_MAX}")
        return value

    @property
    def spiffe_id(self) -> str:
        return f"spiffe://{self.federation}/coordinator/{self.coordinator}"

    @property
    def database_url(self) -> str:
        return self.database or f"sqlite:///{self.state_dir / 'coordinator.db'}"

    @property
    def shown_database(self) -> str:
        """`database` without a password: what settings show of it."""
        from coordinator.store import shown_url  # SQLAlchemy takes time to load

        return shown_url(self.database) if self.database else ""


def load_config(path: Path) -> CoordinatorConfig:
    """Read the coordinator's configuration.

    Raises:
        NotFoundError: no such file.
        UsageError: not strict YAML, an unknown key, a wrong value, or a socket path that is too long; with the line,
            and of a database's URL nothing else.
    """
    try:
        text = read_regular(path)
    except NotFoundError as error:
        raise NotFoundError(error.message, hint="`coordinator init` writes a commented one") from error
    document = strict_yaml.load(text, str(path))
    if isinstance(document.value, Mapping) and "silo" in document.value and "silos" not in document.value:
        raise UsageError(
            f"{path}:{document.line_of(('silo',))}: this is a silo's configuration, not a coordinator's",
            hint="`silo ... --config` takes it; a coordinator's lists its `silos:`",
        )
    if isinstance(document.value, Mapping) and "source" in document.value:
        raise UsageError(f"{path}:{document.line_of(('source',))}: unknown key 'source'", hint="remove it")
    config = _resolved(strict_yaml.validate(CoordinatorConfig, document), path.absolute())
    if len(set(config.silos)) != len(config.silos):
        raise UsageError(f"{path}:{document.line_of(('silos',))}: a silo is listed twice")
    if config.database:
        from coordinator.store import database_url  # SQLAlchemy takes time to load

        try:
            database_url(config.database)
        except UsageError as error:
            where = f"{path}:{document.line_of(('database',))}: database"
            raise UsageError(f"{where}: {error.message}", hint=error.hint) from None
    if len(os.fsencode(config.control.socket)) > UNIX_PATH_BYTES_MAX:
        raise UsageError(
            f"{path}:{document.line_of(('control', 'socket'))}: {config.control.socket} is longer than "
            f"{UNIX_PATH_BYTES_MAX} bytes",
            hint="the kernel takes no longer path for a unix socket; choose a shorter state_dir",
        )
    return config


def _resolved(config: CoordinatorConfig, source: Path) -> CoordinatorConfig:
    here = source.parent

    def absolute(path: Path, base: Path = here) -> Path:
        path = path.expanduser()
        return path if path.is_absolute() else base / path

    state_dir = absolute(config.state_dir)
    identity = {name: absolute(getattr(config.identity, name)) for name in IdentityFiles.model_fields}
    return config.model_copy(
        update={
            "site": config.site or config.coordinator,
            "state_dir": state_dir,
            "identity": config.identity.model_copy(update=identity),
            "charter": absolute(config.charter),
            "expected": config.expected.model_copy(update={"lora_schema": absolute(config.expected.lora_schema)}),
            "public": config.public.model_copy(update={"path": absolute(config.public.path)}),
            "control": config.control.model_copy(update={"socket": absolute(config.control.socket, state_dir)}),
            "source": source,
        }
    )
