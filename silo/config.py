"""A site's configuration file (`hospital_a.yaml`): the closed schema and where its paths point.

Unknown keys, duplicate keys and wrong types are errors with the line number (threat T35). Relative paths are taken
from the folder of the configuration file, so that a site's folder can be moved as a whole. Loading opens no other
file; whether what it names exists is checked at start (`silo check`).
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedsilo.files.durable import read_regular
from fedsilo.grading.own_verifiers import AnyVerifier as Verifier
from fedsilo.protocol import strict_yaml
from fedsilo.protocol.errors import NotFoundError, UsageError
from fedsilo.protocol.plan import Name, Sha256
from silo.budgets import CACHE_BYTES, MICROBATCH_TOKENS
from silo.measuring import PromptSet

LoadType = Literal["fp32", "bf16", "nf4", "fp8"]
# A unix socket's address is a C string of 108 bytes, the closing zero among them.
UNIX_PATH_BYTES_MAX = 107
PORT_MAX = 65535
_PROXY_URL = re.compile(r"http://([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\]):\d{1,5}/?")


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class CoordinatorPlace(_Closed):
    """Where the coordinator listens. Its identity comes from the certificates, never from this address."""

    # host:port, or `files`: nothing is dialled, and people carry files (docs/how-to/air-gapped.md)
    address: str = Field(pattern=r"^[^\s:]+(:\d{1,5})$|^\[[0-9a-fA-F:]+\]:\d{1,5}$|^files$")
    proxy: str | None = None  # http://HOST:PORT: through this proxy, by CONNECT; no variable of the environment is read
    proxy_credentials: Path | None = None  # USER:PASSWORD for it; mode 0600
    # How long nothing may cross while an answer is awaited before a ping does: less than what a firewall, a proxy or a
    # NAT takes for dead. The coordinator takes no more than one in 10 seconds.
    keepalive_seconds: float = Field(20.0, ge=15, le=3600)

    @field_validator("address")
    @classmethod
    def _port_exists(cls, value: str) -> str:
        if value != "files" and not 0 < int(value.rpartition(":")[2]) <= PORT_MAX:
            raise ValueError(f"a port to dial is 1 to {PORT_MAX}")
        return value

    @model_validator(mode="after")
    def _dials_or_not(self) -> CoordinatorPlace:
        if self.by_files and self.proxy is not None:
            raise strict_yaml.WrongValueError("there is no proxy where nothing is dialled", "leave it out")
        return self

    @field_validator("proxy", mode="before")
    @classmethod
    def _is_plain_url(cls, value: Any) -> Any:
        if value is not None and not (isinstance(value, str) and _PROXY_URL.fullmatch(value)):
            # A password may stand in it, so it is not repeated.
            hint = "http://HOST:PORT; a user and a password go into the file that proxy_credentials names"
            raise strict_yaml.WrongValueError("this is no address of an HTTP proxy", hint)
        return value

    @property
    def by_files(self) -> bool:
        return self.address == "files"

    @property
    def first_hop(self) -> str:
        """host:port of what is dialled: the proxy, where there is one."""
        return self.address if self.proxy is None else self.proxy.removeprefix("http://").removesuffix("/")


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


class Fields(_Closed):
    """The names of a task's fields in the private files. The public and the held-out set have the standard names."""

    id: str = Field("id", min_length=1)
    prompt: str = Field("prompt", min_length=1)
    answer: str = Field("answer", min_length=1)
    topic: str = Field("topic", min_length=1)
    group: str = Field("group", min_length=1)  # whose a row is, such as a patient: no split divides a group


class Data(_Closed):
    collection: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
    private: tuple[Path, ...] = Field(min_length=1)
    verifier: Verifier
    fields: Fields = Fields()
    # How a prompt becomes text: chat (the model folder's template), plain (the prompt as it is) or a file with a chat
    # template. None: chat where the folder has one, else plain. Its hash is in the hello and in the run record.
    template: Literal["chat", "plain"] | Path | None = None
    holdout_share: float = Field(0.0, ge=0, le=0.5)  # of the private rows, by group: never trained on
    public: PublicFile
    held_out: HeldOutFile
    canaries: Path | None = None  # texts that must never leave, one a line; mode 0600, the guard alone reads it


class Model(_Closed):
    path: Path
    load: LoadType = "fp32"


class Rollout(_Closed):
    """Where answers are sampled. `embedded`: in the trainer; `vllm`: by a server behind a unix socket."""

    engine: Literal["auto", "embedded", "vllm"] = "auto"  # auto: vllm where a url is given
    url: str | None = Field(None, pattern=r"^unix:/\S+$")  # None with vllm: below state_dir
    # Where public prompts go: a server that never sees a private one. None: a second server. The same address as `url`:
    # one server, drained and its prefix cache emptied in between.
    public_url: str | None = Field(None, pattern=r"^unix:/\S+$")
    launch: Literal["child", "external"] = "child"  # child: the guard starts and supervises the servers
    python: Path | None = None  # child: an interpreter that has vLLM; None: the guard's own
    # child: instead of the built-in arguments of `python -m`; {model} {load} {socket} stand for what they say
    command: tuple[str, ...] | None = None
    max_lora_rank: int = Field(32, ge=1)  # at least the plan's rank; vLLM takes 8, 16, 32, 64, ...
    max_model_tokens: int = Field(4096, ge=16)  # of a prompt and its answer together
    kv_cache_bytes: int = Field(1 << 30, ge=1 << 20)  # keys and values of one server
    sleep: Literal["auto", "off"] = "auto"  # the server frees its memory while the trainer trains, where it can
    start_timeout_seconds: float = Field(600.0, gt=0)  # also for each restart
    # Proof that the engine computes the adapter that is trained: share of a step's tokens to look at; 0 proves by name
    # alone. Nats per token by which engine and trainer may differ. Rollouts from one marker to the next; 0: none.
    agreement_share: float = Field(0.02, ge=0, le=1)
    kl_max: float = Field(0.02, gt=0)
    marker_pushes: int = Field(50, ge=0)

    @property
    def chosen(self) -> Literal["embedded", "vllm"]:
        """The engine; `auto` resolved."""
        if self.engine == "auto":
            return "embedded" if self.url is None else "vllm"
        return self.engine


class Acceptance(_Closed):
    """A global adapter is measured on this site's own prompts before anything is trained from it (T20, T52)."""

    prompts: tuple[PromptSet, ...] = Field(("private",), min_length=1)  # private: the rows of data.holdout_share
    samples: int = Field(1, ge=1, le=64)  # answers to each prompt
    drop_max: float = Field(0.05, ge=0, lt=1)  # of the share of right answers, against the last accepted adapter
    prompts_min: int = Field(30, ge=2)  # with fewer nothing can be said, and the adapter is held

    @field_validator("prompts", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return tuple(dict.fromkeys(value)) if isinstance(value, list) else value


class Trainer(_Closed):
    """The training process. `child`: the guard starts it; `external`: somebody else does, and it dials `address`."""

    launch: Literal["child", "external"] = "child"
    address: str = Field("unix:run/trainer.sock", pattern=r"^(unix:\S+|tls:([^\s:]+|\[[0-9a-fA-F:]+\]):\d{1,5})$")
    user: str | None = None  # external, unix: whose processes may connect; None: the guard's own user's
    name: Name | None = None  # external, tls: spiffe://SITE/trainer/NAME; None: any trainer of this site
    devices: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | Literal["auto"] = "auto"
    microbatch_tokens: int = Field(MICROBATCH_TOKENS, ge=64)
    cache_bytes: int = Field(CACHE_BYTES, ge=1 << 20)  # keys and values of one batch of rollouts
    checkpointing: bool = False  # a training step keeps each layer's input and computes the rest twice
    processes: int = Field(1, ge=1, le=1024)  # child: so many train together, one an accelerator, or on the CPU
    shard_base: bool = False  # each process keeps its share of the base's weights alone; computes as `checkpointing`
    isolation: Literal["auto", "namespaces", "user", "container", "waived"] = "auto"
    scratch: Path | None = None  # external: its --scratch folder, where the guard sees it; for the overlap screen
    must_not_reach: tuple[str, ...] = ()  # external: what answers the guard and must stay silent towards the trainer
    start_timeout_seconds: float = Field(180.0, gt=0)
    python: Path | None = None  # another interpreter that has the training libraries; None: the guard's own

    @property
    def unix_path(self) -> Path | None:
        """Where the guard listens for it; None for a `tls:` address."""
        scheme, _, rest = self.address.partition(":")
        return Path(rest) if scheme == "unix" else None

    @field_validator("threads", mode="before")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise strict_yaml.WrongValueError(f"{value!r} is no number of threads", "a whole number from 1, or auto")
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
            if not right or "%" in host or kind not in ("tcp", "udp") or not port.isdecimal() or int(port) > PORT_MAX:
                raise ValueError(f"{each!r} is not tcp:ADDRESS:PORT or udp:ADDRESS:PORT, with [ADDRESS] for IPv6")
        return tuple(value) if isinstance(value, list) else value


class Control(_Closed):
    """The site's local socket: reading for its group, changes only as signed commands."""

    socket: Path = Path("control.sock")  # not beside the trainer's socket: that folder is inside its sandbox
    group: str = "fedsilo-operators"


class SiloConfig(_Closed):
    """The configuration of one site. `source` is the file it came from; all paths are absolute after `load_config`."""

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
    acceptance: Acceptance | None = None  # None: no adapter is measured
    control: Control = Control()
    silos_on_this_host: int = Field(1, ge=1)  # only for the warning that threads x silos exceed the cores
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"  # of standard error; logs/guard.log, which the console reads, is text
    site_secret: Path | None = None  # 32 bytes as hex, mode 0600; None: made in state_dir at the first start
    source: Path = Field(Path(), exclude=True)  # not a key of the file

    @property
    def spiffe_id(self) -> str:
        return f"spiffe://{self.federation}/silo/{self.silo}"

    @property
    def held_out_verifier(self) -> str:
        return self.data.held_out.verifier or self.data.public.verifier

    @property
    def key_files(self) -> list[Path]:
        """The federation's keys and the proxy's credentials, which no trainer may see."""
        proxy = self.coordinator.proxy_credentials
        return [self.identity.key, self.identity.signing_key, *([] if proxy is None else [proxy])]

    @property
    def rollout_sockets(self) -> tuple[Path, Path]:
        """Return where the servers for private and for public prompts listen; twice the same where one serves both."""
        folder = self.state_dir / "rollout"
        given = (self.rollout.url, self.rollout.public_url)
        private, public = (
            folder / name / "run" / "server.sock" if url is None else Path(url.removeprefix("unix:"))
            for name, url in zip(("private", "public"), given, strict=True)
        )
        return private, public

    @property
    def threads(self) -> int:
        """Torch threads of each process of the trainer: as given, or the cores shared out among all of this host."""
        if isinstance(self.trainer.threads, int):
            return self.trainer.threads
        return max(1, (os.cpu_count() or 1) // (self.silos_on_this_host * self.trainer.processes))


def place_of(config: SiloConfig, key: str) -> str:
    """File and line of a key such as "data.canaries", for a message about its value."""
    try:
        line = strict_yaml.load(read_regular(config.source), str(config.source)).line_of(tuple(key.split(".")))
    except (NotFoundError, UsageError):  # removed or rewritten since it was read
        return str(config.source)
    return f"{config.source}:{line}"


def load_config(path: Path) -> SiloConfig:
    """Read a site's configuration.

    Raises:
        NotFoundError: no such file.
        UsageError: not strict YAML, an unknown key, a wrong value, or a socket path that is too long; with the line.
    """
    try:
        text = read_regular(path)
    except NotFoundError as error:
        raise NotFoundError(error.message, hint="`silo init` writes a commented one") from error
    return config_from(text, path)


def config_from(text: bytes, path: Path) -> SiloConfig:
    """A site's configuration that is, or will be, in a file. Raises UsageError as `load_config`."""
    document = strict_yaml.load(text, str(path))
    if isinstance(document.value, Mapping) and "silo" not in document.value and "silos" in document.value:
        raise UsageError(
            f"{path}:{document.line_of(('silos',))}: this is a coordinator's configuration, not a silo's",
            hint="`coordinator ... --config` takes it; a silo's begins with `silo: NAME`",
        )
    if isinstance(document.value, Mapping) and "source" in document.value:
        raise UsageError(f"{path}:{document.line_of(('source',))}: unknown key 'source'", hint="remove it")
    config = _resolved(strict_yaml.validate(SiloConfig, document), path.absolute())
    for wrong, key, message, hint in _mistakes(config):
        if wrong:
            raise UsageError(f"{path}:{document.line_of(tuple(key.split('.')))}: {key}: {message}", hint=hint)
    return config


def _mistakes(config: SiloConfig) -> Iterator[tuple[bool, str, str, str]]:
    """Yield (wrong, key, message, hint) of what a closed schema cannot say: keys without effect, keys that contradict
    each other, and socket paths that the kernel does not take."""
    trainer, identity = config.trainer, config.identity
    external, tls = trainer.launch == "external", trainer.unix_path is None
    link_files = [name for name in ("link_certificate", "link_key") if getattr(identity, name) is not None]
    yield from (
        (config.coordinator.proxy is None and config.coordinator.proxy_credentials is not None,
         "coordinator.proxy_credentials", "without effect, there is no proxy", "give proxy, or remove it"),
        (tls and not external, "trainer.address", "a tls: address is for launch: external",
         "a child of the guard talks over a unix socket: unix:run/trainer.sock"),
        (external and trainer.isolation in ("namespaces", "user"), "trainer.isolation",
         f"the guard builds no {trainer.isolation} sandbox around a trainer that somebody else starts",
         "write auto: the guard probes what it got; or container, or waived"),
        (trainer.processes > 1 and external, "trainer.processes", "processes is for launch: child",
         "whoever starts the trainer says it: --processes N, or torchrun"),
        (trainer.processes > 1 and trainer.isolation == "user", "trainer.processes",
         "no socket can be made in a sandbox of isolation level user, so processes cannot talk to each other",
         "isolation: namespaces, or processes: 1"),
        (trainer.shard_base and not external and trainer.processes == 1, "trainer.shard_base",
         "without effect, there is one process", "processes: 2 or more, or remove it"),
        (trainer.shard_base and config.model.load in ("nf4", "fp8"), "trainer.shard_base",
         f"weights that are loaded as {config.model.load} are not sharded", "model.load: bf16, or shard_base: false"),
        (trainer.user is not None and (tls or not external), "trainer.user",
         "user is for launch: external with a unix: address", "remove it"),
        (bool(trainer.must_not_reach) and not external, "trainer.must_not_reach",
         "must_not_reach is for launch: external", "remove it"),
        (trainer.scratch is not None and not external, "trainer.scratch", "scratch is for launch: external",
         "remove it: a child of the guard has its scratch folder in state_dir"),
        (trainer.name is not None and not tls, "trainer.name", "name is for a tls: address", "remove it"),
        (tls and len(link_files) < 2, "trainer.address",
         "a tls: address needs identity.link_certificate and identity.link_key",
         "`fedsilo certs invite guard/guard --ca SITE_CA`, then request and sign"),
        (not tls and bool(link_files), ".".join(("identity", *link_files[:1])),
         "without effect: trainer.address is not tls:", "remove it"),
        (tls and identity.link_key == identity.key, "identity.link_key",
         "the link to the trainer has a key of its own, never the federation's", "`fedsilo certs request` makes one"),
    )  # fmt: skip
    rollout, external, vllm = config.rollout, config.rollout.launch == "external", config.rollout.chosen == "vllm"
    sockets = config.rollout_sockets
    yield from (
        (rollout.engine == "embedded" and rollout.url is not None, "rollout.url", "without effect: engine is embedded",
         "remove it, or engine: vllm"),
        (not vllm and rollout.public_url is not None, "rollout.public_url", "without effect: the engine is embedded",
         "give url as well, or remove it"),
        (vllm and external and (rollout.url is None or rollout.public_url is None), "rollout.launch",
         "launch: external needs url and public_url", "the same address twice is one server for both"),
        (external and rollout.command is not None, "rollout.command", "command is for launch: child", "remove it"),
        (external and rollout.python is not None, "rollout.python", "python is for launch: child", "remove it"),
        (vllm and config.model.load not in ("fp32", "bf16"), "rollout.engine",
         f"vLLM would not compute the base as {config.model.load}, as the trainer does", "model.load: bf16 or fp32"),
        (vllm and not external and len({socket.parent for socket in sockets}) < len(set(sockets)), "rollout.public_url",
         "each server's socket needs a folder of its own",
         "such as unix:/run/fedsilo/private/server.sock and unix:/run/fedsilo/public/server.sock"),
    )  # fmt: skip
    measured = () if config.acceptance is None else config.acceptance.prompts
    yield from (
        (config.charter_sha256 is not None and config.charter is None, "charter_sha256",
         "without effect, there is no charter", "charter: charter.yaml, or remove it"),
        ("private" in measured and config.data.holdout_share == 0, "acceptance",
         "no private rows are set aside to measure on", "data.holdout_share: 0.1, or prompts: [held_out]"),
    )  # fmt: skip
    paths = {"trainer.address": trainer.unix_path, "control.socket": config.control.socket}
    paths |= dict(zip(("rollout.url", "rollout.public_url"), sockets, strict=True)) if vllm else {}
    for key, path in paths.items():
        long = path is not None and len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX
        hint = "the kernel takes no longer path for a unix socket; choose a shorter state_dir"
        yield long, key, f"{path} is longer than {UNIX_PATH_BYTES_MAX} bytes", hint


def _resolved(config: SiloConfig, source: Path) -> SiloConfig:
    """Make all paths absolute: sockets from `state_dir`, everything else from the folder of the file."""
    here = source.parent

    def absolute(path: Path, base: Path = here) -> Path:
        path = path.expanduser()
        path = path if path.is_absolute() else base / path
        # In a sandbox only what is named is there, so what `folder/..` leads through would be missing.
        return path.resolve() if ".." in path.parts else path

    state_dir, unix_path = absolute(config.state_dir), config.trainer.unix_path
    changed: dict[str, Any] = {
        "control": config.control.model_copy(update={"socket": absolute(config.control.socket, state_dir)})
    }
    if unix_path is not None:
        address = f"unix:{absolute(unix_path, state_dir)}"
        changed["trainer"] = config.trainer.model_copy(update={"address": address})
    config = _with_paths(config.model_copy(update=changed), absolute)
    return config.model_copy(update={"source": source})


def _with_paths(value: Any, change: Callable[[Path], Path]) -> Any:
    """Return a value of a configuration with every path in it changed."""
    if isinstance(value, Path):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_with_paths(each, change) for each in value)
    if isinstance(value, _Closed):
        return value.model_copy(update={name: _with_paths(each, change) for name, each in value})
    return value
