"""The `configure` message: what the guard tells the trainer of its site."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsilo.files.task_files import STANDARD, FieldNames
from fedsilo.protocol.errors import UsageError
from silo.budgets import CACHE_BYTES, MICROBATCH_TOKENS
from silo.trainer.rollout.place import RolloutPlace, place_from
from silo.trainer.screen_index import IndexSettings, settings_from


@dataclass(frozen=True)
class Configuration:
    """The `configure` message. Paths are as the trainer sees them inside its sandbox."""

    silo: str
    model_path: Path
    load: str
    private: tuple[Path, ...]
    verifier: str
    public_path: Path
    public_verifier: str
    held_out_path: Path
    held_out_verifier: str
    site_secret: bytes = field(repr=False)
    threads: int
    microbatch_tokens: int
    cache_bytes: int
    checkpointing: bool
    shard_base: bool
    scratch: Path | None
    holdout_share: float = 0.0
    fields: FieldNames = STANDARD
    template: str | None = None  # as in `TextCodec`
    screen_index: IndexSettings | None = None
    own_verifiers_sha256: str | None = None  # as the guard finds them; None: not compared
    rollout: RolloutPlace | None = None  # None: the embedded engine
    agreement: dict[str, float] = field(default_factory=dict)  # of the engine with the trainer; empty: the defaults


def configuration_from(fields: dict[str, Any]) -> Configuration:
    """Raises UsageError: a field is missing or of another type."""
    try:
        scratch = fields.get("scratch")
        return Configuration(
            silo=str(fields["silo"]),
            model_path=Path(fields["model"]["path"]),
            load=str(fields["model"]["load"]),
            private=tuple(Path(path) for path in fields["private"]),
            verifier=str(fields["verifier"]),
            public_path=Path(fields["public"]["path"]),
            public_verifier=str(fields["public"]["verifier"]),
            held_out_path=Path(fields["held_out"]["path"]),
            held_out_verifier=str(fields["held_out"]["verifier"]),
            site_secret=bytes.fromhex(fields["site_secret"]),
            threads=int(fields.get("threads") or 1),
            microbatch_tokens=int(fields.get("microbatch_tokens") or MICROBATCH_TOKENS),
            cache_bytes=int(fields.get("cache_bytes") or CACHE_BYTES),
            checkpointing=bool(fields.get("checkpointing")),
            shard_base=bool(fields.get("shard_base")),
            scratch=Path(scratch) if scratch else None,
            holdout_share=float(fields.get("holdout_share") or 0.0),
            fields=FieldNames(**fields.get("fields", {})),
            template=fields.get("template"),
            screen_index=settings_from(fields.get("screen_index")),
            own_verifiers_sha256=fields.get("own_verifiers_sha256"),
            rollout=place_from(fields.get("rollout")),
            agreement={str(name): float(value) for name, value in dict(fields.get("agreement") or {}).items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the trainer's configuration lacks or misstates {error}") from error
