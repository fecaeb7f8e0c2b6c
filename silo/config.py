"""A site's configuration file (`hospital_a.yaml`): the closed schema and where its paths point.

Unknown keys, duplicate keys and wrong types are errors with the line number (threat T35). Relative paths are taken
from the folder of the configuration file, so that a site's folder can be moved as a whole. Loading touches no other
file; whether what it names exists is checked at start (`silo check`).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedsilo.treaty import strict_yaml
from fedsilo.treaty.errors import NotFoundError, UsageError
from fedsilo.treaty.plan import Name, Sha256

Verifier = Literal["math", "choice", "exact", "numeric", "format", "code"]
LoadType = Literal["fp32", "bf16", "nf4", "fp8"]
# A unix socket's address is a C string of 108 bytes, the closing zero among them.
UNIX_PATH_BYTES_MAX = 107


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class CoordinatorPlace(_Closed):
    """Where the coordinator listens. Its identity comes from the certificates, never from this address."""

    address: str = Field(pattern=r"^[^\s:]+(:\d{1,5})$|^\[[0-9a-fA-F:]+\]:\d{1,5}$")


class IdentityFiles(_Closed):
    certificate: Path
    key: Path
    signing_key: Path
    federation_ca: Path
    site_ca: Path
    operators: Path  # roles.yaml: what each person may do
    coordinator_key: Path = Path("id/coordinator.pub")  # the coordinator's message-signing key, checked against the pin
    link_certificate: Path | None = None  # under the site CA, for a trainer at a tls: address
    link_key: Path | None = None


class PublicFile(_Closed):
    path: Path
    sha256: Sha256
    verifier: Verifier


class HeldOutFile(_Closed):
    path: Path
    sha256: Sha256
    verifier: Verifier | None = None  # None: that of the public set


class Data(_Closed):
    collection: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
    private: tuple[Path, ...] = Field(min_length=1)
    verifier: Verifier
    holdout_share: float = Field(0.0, ge=0, le=0.5)  # of the private rows, by group: never trained on
    public: PublicFile
    held_out: HeldOutFile
    canaries: Path | None = None  # texts that must never leave, one a line; mode 0600, the guard alone reads it

    @field_validator("private", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class Model(_Closed):
    path: Path
    load: LoadType = "fp32"


class Rollout(_Closed):
    engine: Literal["auto", "embedded", "vllm"] = "auto"
    url: str | None = Field(None, pattern=r"^unix:/\S+$")


class Trainer(_Closed):
    """The training process. `child`: the guard starts it; `external`: somebody else does, and it dials `address`."""

    launch: Literal["child", "external"] = "child"
    address: str = Field("unix:run/trainer.sock", pattern=r"^(unix:\S+|tls:([^\s:]+|\[[0-9a-fA-F:]+\]):\d{1,5})$")
    user: str | None = None  # external, unix: whose processes may connect; None: the guard's own user's
    name: Name | None = None  # external, tls: spiffe://SITE/trainer/NAME; None: any trainer of this site
    devices: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | Literal["auto"] = "auto"
    microbatch_tokens: int = Field(16384, ge=64)
    cache_bytes: int = Field(2 << 30, ge=1 << 20)  # keys and values of one batch of rollouts
    checkpointing: bool = False  # a training step keeps each layer's input and computes the rest twice
    isolation: Literal["auto", "namespaces", "user", "container", "waived"] = "auto"
    scratch: Path | None = None  # external: its --scratch folder, where the guard sees it; for the overlap screen
    must_not_reach: tuple[str, ...] = ()  # external: what answers the guard and must stay silent towards the trainer
    start_timeout_seconds: float = Field(180.0, gt=0)
    python: Path | None = None  # another interpreter that has the training libraries; None: the guard's own

    @field_validator("threads")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("threads is a number from 1, or auto")
        return value

    @field_validator("must_not_reach", mode="before")
    @classmethod
    def _places(cls, value: Any) -> Any:
        for each in value if isinstance(value, list) else ():
            kind, _, place = str(each).partition(":")
            host, _, port = place.rpartition(":")
            try:
                bracketed = host.startswith("[") and host.endswith("]")
                right = ipaddress.ip_address(host[1:-1] if bracketed else host).version == (6 if bracketed else 4)
            except ValueError:
                right = False
            if not right or "%" in host or kind not in ("tcp", "udp") or not port.isdecimal() or int(port) > 65535:
                raise ValueError(f"{each!r} is not tcp:ADDRESS:PORT or udp:ADDRESS:PORT, with [ADDRESS] for IPv6")
        return tuple(value) if isinstance(value, list) else value


class Control(_Closed):
    """The site's local socket: reading for its group, changes only as signed commands (design 2)."""

    socket: Path = Path("control.sock")  # not beside the trainer's socket: that folder is inside its walls
    group: str = "fedsilo-operators"


class SiloConfig(_Closed):
    """One site. `source` is the file it came from; all paths are absolute after `load_config`."""

    silo: Name
    role: Literal["member", "lead"] = "member"
    federation: Name
    coordinator: CoordinatorPlace
    state_dir: Path
    identity: IdentityFiles
    policy: Path
    charter: Path | None = None  # the federation's own policy; what it does not allow is not allowed here either
    charter_sha256: Sha256 | None = None  # its digest as agreed (`fedsilo policy hash`); None: not compared
    data: Data
    model: Model
    rollout: Rollout = Rollout()
    trainer: Trainer = Trainer()
    control: Control = Control()
    silos_on_this_host: int = Field(1, ge=1)  # only for the warning that threads x silos exceed the cores
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    site_secret: Path | None = None  # 32 bytes as hex, mode 0600; None: made in state_dir at the first start
    source: Path = Field(Path(), exclude=True)  # not a key of the file

    @property
    def spiffe_id(self) -> str:
        return f"spiffe://{self.federation}/silo/{self.silo}"

    @property
    def held_out_verifier(self) -> str:
        return self.data.held_out.verifier or self.data.public.verifier

    @property
    def threads(self) -> int:
        """Torch threads of the trainer: as given, or the cores shared out among the silos of this host."""
        if isinstance(self.trainer.threads, int):
            return self.trainer.threads
        return max(1, (os.cpu_count() or 1) // self.silos_on_this_host)


def place_of(config: SiloConfig, key: str) -> str:
    """File and line of a key such as "data.canaries", for a message about its value."""
    try:
        line = strict_yaml.load(config.source.read_bytes(), str(config.source)).line_of(tuple(key.split(".")))
    except (OSError, UsageError):  # removed or rewritten since it was read
        return str(config.source)
    return f"{config.source}:{line}"


def load_config(path: Path) -> SiloConfig:
    """Read a site's configuration.

    Raises:
        NotFoundError: no such file.
        UsageError: not strict YAML, an unknown key, a wrong value, or a socket path that is too long; with the line.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist", hint="`silo init` writes a commented one") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return config_from(text, path)


def config_from(text: bytes, path: Path) -> SiloConfig:
    """A site's configuration that is, or will be, in a file. Raises UsageError as `load_config`."""
    document = strict_yaml.load(text, str(path))
    if isinstance(document.value, Mapping) and "source" in document.value:
        raise UsageError(f"{path}:{document.line_of(('source',))}: unknown key 'source'", hint="remove it")
    config = strict_yaml.validate(SiloConfig, document)
    config = _resolved(config, path.absolute())
    _check_trainer_keys(config, document)
    if config.charter_sha256 is not None and config.charter is None:
        raise UsageError(
            f"{path}:{document.line_of(('charter_sha256',))}: charter_sha256: without effect, there is no charter",
            hint="charter: charter.yaml, or remove it",
        )
    for name, socket_path in (
        ("trainer.address", _unix_path(config.trainer)),
        ("control.socket", config.control.socket),
    ):
        if socket_path is not None and len(os.fsencode(socket_path)) > UNIX_PATH_BYTES_MAX:
            line = document.line_of(tuple(name.split(".")))
            raise UsageError(
                f"{path}:{line}: {name}: {socket_path} is longer than {UNIX_PATH_BYTES_MAX} bytes",
                hint="the kernel takes no longer path for a unix socket; choose a shorter state_dir",
            )
    return config


def _check_trainer_keys(config: SiloConfig, document: strict_yaml.Document) -> None:
    """Keys that would be without effect, or that contradict each other. Raises UsageError with the line."""
    trainer, identity = config.trainer, config.identity
    external, tls = trainer.launch == "external", trainer.address.startswith("tls:")
    link_files = [name for name in ("link_certificate", "link_key") if getattr(identity, name) is not None]
    for wrong, path, message, hint in (
        (tls and not external, ("trainer", "address"), "a tls: address is for launch: external",
         "a child of the guard talks over a unix socket: unix:run/trainer.sock"),
        (external and trainer.isolation in ("namespaces", "user"), ("trainer", "isolation"),
         f"the guard builds no {trainer.isolation} walls around a trainer that somebody else starts",
         "write auto: the guard probes what it got; or container, or waived"),
        (trainer.user is not None and (tls or not external), ("trainer", "user"),
         "user is for launch: external with a unix: address", "remove it"),
        (bool(trainer.must_not_reach) and not external, ("trainer", "must_not_reach"),
         "must_not_reach is for launch: external", "remove it"),
        (trainer.scratch is not None and not external, ("trainer", "scratch"), "scratch is for launch: external",
         "remove it: a child of the guard has its scratch folder in state_dir"),
        (trainer.name is not None and not tls, ("trainer", "name"), "name is for a tls: address", "remove it"),
        (tls and len(link_files) < 2, ("trainer", "address"),
         "a tls: address needs identity.link_certificate and identity.link_key",
         "`fedsilo certs invite guard/guard --ca SITE_CA`, then request and sign"),
        (not tls and bool(link_files), ("identity", *link_files[:1]), "without effect: trainer.address is not tls:",
         "remove it"),
        (tls and identity.link_key == identity.key, ("identity", "link_key"),
         "the link to the trainer has a key of its own, never the federation's", "`fedsilo certs request` makes one"),
    ):  # fmt: skip
        if wrong:
            raise UsageError(f"{config.source}:{document.line_of(path)}: {'.'.join(path)}: {message}", hint=hint)


def _unix_path(trainer: Trainer) -> Path | None:
    scheme, _, rest = trainer.address.partition(":")
    return Path(rest) if scheme == "unix" else None


def _resolved(config: SiloConfig, source: Path) -> SiloConfig:
    """All paths absolute: sockets from `state_dir`, everything else from the folder of the file."""
    here = source.parent

    def absolute(path: Path, base: Path = here) -> Path:
        path = path.expanduser()
        return path if path.is_absolute() else base / path

    state_dir = absolute(config.state_dir)
    given = {name: getattr(config.identity, name) for name in IdentityFiles.model_fields}
    identity = config.identity.model_copy(
        update={name: absolute(path) for name, path in given.items() if path is not None}
    )
    data = config.data.model_copy(
        update={
            "private": tuple(absolute(path) for path in config.data.private),
            "public": config.data.public.model_copy(update={"path": absolute(config.data.public.path)}),
            "held_out": config.data.held_out.model_copy(update={"path": absolute(config.data.held_out.path)}),
            "canaries": None if config.data.canaries is None else absolute(config.data.canaries),
        }
    )
    unix_path = _unix_path(config.trainer)
    trainer = config.trainer.model_copy(
        update={
            "address": config.trainer.address if unix_path is None else f"unix:{absolute(unix_path, state_dir)}",
            "python": None if config.trainer.python is None else absolute(config.trainer.python),
            "scratch": None if config.trainer.scratch is None else absolute(config.trainer.scratch),
        }
    )
    return config.model_copy(
        update={
            "state_dir": state_dir,
            "identity": identity,
            "policy": absolute(config.policy),
            "charter": None if config.charter is None else absolute(config.charter),
            "data": data,
            "model": config.model.model_copy(update={"path": absolute(config.model.path)}),
            "trainer": trainer,
            "control": config.control.model_copy(update={"socket": absolute(config.control.socket, state_dir)}),
            "site_secret": None if config.site_secret is None else absolute(config.site_secret),
            "source": source,
        }
    )
