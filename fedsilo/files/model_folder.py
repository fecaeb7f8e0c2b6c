"""Reads a Hugging Face model folder without torch: its fingerprints, and the LoRA schema that follows from it.

The base model's fingerprint covers config.json (without the keys that name paths and library versions), every byte of
the weights, and the tokens that generation_config.json ends an answer with, where they are others than config.json's:
two silos that end answers differently would train on answers of different lengths. Nothing else of that file is read.
Tokenizer and chat template have fingerprints of their own, since a silo may differ in one of them only. Whoever reads
weights asks `weight_files` for them, so that what is hashed is what is trained on.

`read_template` reads the template that turns a prompt into what the model reads, whose hash all silos must share:
`chat` is the model folder's own, `plain` is none at all (the prompt goes in as it is), anything else is a file. The
hash is the SHA-256 of the template's bytes, so a file with the folder's template counts as the same; of plain it is
that of no bytes. It takes the place of the folder's own in the model's fingerprints, and so the policy's pin, the
hello, the plan and the run record name it. Nothing is rendered here: the trainer does that, in transformers' own
sandbox (threat T22).

What the hash does not cover: what a template reads besides the prompt. Some read the date (`reads_clock`); then silos
train on prompts of other days under one hash, and a run cannot be repeated exactly. That is a warning of `silo check`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.protocol.codec import DTYPE_ITEM_BYTES, canonical_json, sha256_hex
from fedsilo.protocol.errors import NotFoundError, UsageError
from fedsilo.protocol.factors import freeze_named
from policies.schema import LoraSchema

_HEADER_BYTES_MAX = 100 << 20  # the limit of the safetensors format itself
# They differ between two copies of the same model, saved by other versions or from other places.
_VOLATILE_KEYS = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
# Their weights are stored transposed, so shapes in the file are not [out, in].
_TRANSPOSED_FAMILIES = frozenset({"gpt2", "openai-gpt", "imagegpt"})
# transformers reads them where tokenizer_config.json lists no added tokens; they name special tokens, such as the one
# that ends an answer.
_TOKENS_FILES = ("special_tokens_map.json", "added_tokens.json")
FLOATS: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes a number


@dataclass(frozen=True)
class Fingerprints:
    base_model_sha256: str
    tokenizer_sha256: str
    template_sha256: str


def read_fingerprints(folder: Path) -> Fingerprints:
    """Hash a model folder. Reads every byte of the weights, so it takes about a second per gigabyte.

    Raises:
        UsageError: a file is missing or unreadable (named), or the folder asks to run its own code.
    """
    config = read_config(folder)
    weights = {path.name: _file_sha256(path) for path in weight_files(folder)}
    stable = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    ends = ending_ids(folder)
    # Where config.json says the same, a copy of the folder without generation_config.json is the same model.
    more = {} if ends == _ids_of(config, folder / "config.json") else {"ends": sorted(ends)}
    base = sha256_hex(_json_bytes({"config": stable, "weights": weights, **more}))
    tokenizer_config = read_json(folder / "tokenizer_config.json", optional=True)
    settings = {key: value for key, value in tokenizer_config.items() if key not in {*_VOLATILE_KEYS, "chat_template"}}
    beside = () if "added_tokens_decoder" in tokenizer_config else _TOKENS_FILES
    named = {name: read_json(folder / name) for name in beside if (folder / name).is_file()}
    tokenizer = sha256_hex(
        _json_bytes(
            {"tokenizer.json": _file_sha256(_present(folder / "tokenizer.json")), "settings": settings, **named}
        )
    )
    return Fingerprints(base, tokenizer, sha256_hex(_own_template(folder)))


def ending_ids(folder: Path) -> frozenset[int]:
    """Tokens that end an answer, the tokenizer's own aside: generation_config.json's, or else config.json's.

    Raises:
        UsageError: a file is unreadable, or names something else than token ids.
    """
    path = folder / "generation_config.json"
    own = _ids_of(read_json(path, optional=True), path)
    return own or _ids_of(read_config(folder), folder / "config.json")


def _ids_of(settings: dict[str, Any], path: Path) -> frozenset[int]:
    value = settings.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(each) is not int or each < 0 for each in ids):
        raise UsageError(f"{path}: eos_token_id is neither a token id nor a list of them", hint="such as 2 or [2, 7]")
    return frozenset(ids)


def vocabulary_rows(folder: Path) -> int | None:
    """Rows of the embedding, where config.json says how many. Raises UsageError: no readable config.json."""
    rows = read_config(folder).get("vocab_size")
    return rows if type(rows) is int and rows > 0 else None


def lora_schema_of(
    folder: Path,
    rank: int,
    alpha: float,
    targets: str = "all-linear",
    *,
    dtype: str = "float32",
    freeze: str = "none",
    shift_rank: int = 0,
    base_model_sha256: str = "",
) -> LoraSchema:
    """The tensors that peft adapts in this model: the two-dimensional weights inside its numbered layers.

    Embeddings and the output head lie outside the layers; norms are one-dimensional.

    Args:
        folder: with config.json and safetensors files, in one or in shards.
        rank: inner dimension of the factors.
        alpha: the scale is alpha / rank.
        targets: "all-linear", or last parts of module names with commas, such as "q_proj,v_proj".
        dtype: of an update's values on the wire.
        freeze: which factors are neither trained nor sent.
        shift_rank: of the base's shift, no more than a matrix has; 0: there is none.
        base_model_sha256: if already known; else the folder is hashed.

    Raises:
        UsageError: a missing file, a model family whose shapes cannot be told from the file, or no such target.
    """
    try:
        frozen = freeze_named(freeze)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if shift_rank and frozen != "none":
        raise UsageError(
            f"freeze {freeze} averages exactly, so there is nothing for a shift to take", hint="leave one out"
        )
    if rank < 1 or shift_rank < 0 or not 0 < alpha < math.inf or dtype not in DTYPE_ITEM_BYTES:
        raise UsageError(f"rank {rank}, alpha {alpha}, dtype {dtype!r}: not a LoRA schema", hint="rank 32, alpha 64")
    family = str(read_config(folder).get("model_type", ""))
    if family in _TRANSPOSED_FAMILIES:
        raise UsageError(f"{folder}: {family} stores transposed weights, which are not supported")
    wanted = None if targets == "all-linear" else frozenset(part.strip() for part in targets.split(","))
    matched: set[str] = set()
    tensors: list[tuple[str, tuple[int, ...]]] = []
    for name, (shape, stored, _, _) in tensors_of(folder).items():
        parts = name.split(".")
        if len(parts) < 3 or parts[-1] != "weight" or not any(part.isdecimal() for part in parts):
            continue
        module, last = name.removesuffix(".weight"), parts[-2]
        if len(shape) == 1 or (wanted is not None and last not in wanted):
            continue
        if len(shape) != 2 or stored not in FLOATS:
            raise UsageError(
                f"{folder}: {name} has shape {list(shape)} and type {stored}, not a plain matrix",
                hint="name the modules to adapt with targets, or use the model without quantisation",
            )
        matched.add(last)
        output_size, input_size = shape
        tensors.append((f"{module}.lora_A", (rank, input_size)))
        tensors.append((f"{module}.lora_B", (output_size, rank)))
        if frozen == "AB":
            tensors.append((f"{module}.lora_R", (rank, rank)))  # the core between two frozen factors
        if shift := min(shift_rank, output_size, input_size):
            tensors += [(f"{module}.shift_A", (shift, input_size)), (f"{module}.shift_B", (output_size, shift))]
    missing = sorted((wanted or frozenset()) - matched)
    if not tensors or missing:
        raise UsageError(
            f"{folder}: no matrix to adapt for {', '.join(missing) or targets}", hint="try targets all-linear"
        )
    base = base_model_sha256 or read_fingerprints(folder).base_model_sha256
    return LoraSchema(base, rank, float(alpha), dtype, targets, tuple(sorted(tensors)), frozen)


Placed = tuple[tuple[int, ...], str, Path, tuple[int, int]]  # shape, type, file, first and last byte in it


def tensors_of(folder: Path) -> dict[str, Placed]:
    """Return where the tensors of a model folder lie, by name, in order. Raises UsageError as `weight_files` and
    `tensor_places`, or one lies in two shards."""
    placed: dict[str, Placed] = {}
    for path in weight_files(folder):
        header = tensor_places(path)
        if twice := sorted(placed.keys() & header.keys()):
            raise UsageError(f"{folder}: {twice[0]} lies in two shards", hint="copy the whole folder again")
        placed |= header
    return placed


def tensor_places(path: Path) -> dict[str, Placed]:
    """Return where the tensors of a safetensors file lie, by name; only its header is read.

    Raises:
        UsageError: it is not there, or is no whole safetensors file: each tensor begins where the one before it ends,
            and the last one ends the file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 2 <= length <= min(_HEADER_BYTES_MAX, size):
                raise UsageError(f"{path}: not a safetensors file")
            header = json.loads(file.read(length).decode())
        entries = {
            str(name): (
                tuple(map(_count_of, entry["shape"])),
                str(entry["dtype"]),
                path,
                _ends_of(entry["data_offsets"], 8 + length),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist", hint="copy the whole folder again") from error
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: its safetensors header cannot be read") from error
    behind = 8 + length
    for name, (_, _, _, (start, end)) in sorted(entries.items(), key=lambda each: each[1][3]):
        if start != behind or end < start:
            raise UsageError(
                f"{path}: {name[:120]} is at bytes {start} to {end}, and what is before it ends at {behind}",
                hint="copy the file again, or save it anew",
            )
        behind = end
    if behind != size:
        raise UsageError(
            f"{path} has {size} bytes, its header names {behind}",
            hint="copy it again: " + ("the end is missing" if behind > size else "no tensor holds what is at its end"),
        )
    return entries


def _count_of(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]} is no count")
    return value


def _ends_of(offsets: Sequence[object], data: int) -> tuple[int, int]:
    start, end = offsets
    return data + _count_of(start), data + _count_of(end)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, sorted by name: those of the index, or `model.safetensors` (threat T1).

    A folder is refused where programs differ in what they read: transformers takes `model.safetensors` before an index,
    vLLM every file where there is no index, and transformers puts an adapter that lies in the folder upon the base.

    What it does not stop: a loader that goes by a rule of its own, such as one for `consolidated.safetensors`.

    Raises:
        UsageError: a file is missing, or it is not certain which files are meant; named.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"{folder}: adapter_config.json says that an adapter lies upon the base model",
            hint="use a folder that holds the base model alone",
        )
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise UsageError(f"{index}: it lists no weights")
        names = sorted({str(name) for name in listed.values()})
        if any("/" in name or name.startswith(".") for name in names):
            raise UsageError(f"{index}: a shard lies outside the folder")
        if single.exists() and names != [single.name]:
            raise UsageError(
                f"{folder}: it holds {single.name} beside {index.name}, and programs differ in which they read",
                hint="remove the one that is not the model's",
            )
        return [_present(folder / name) for name in names]
    beside = sorted(path.name for path in folder.glob("*.safetensors") if path != single)
    if beside and single.exists():
        raise UsageError(
            f"{folder}: it holds {beside[0]} beside {single.name} and no index, and programs differ in which they read",
            hint="remove what is not the model's, or copy its model.safetensors.index.json",
        )
    return [_present(single)]


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's config.json. Raises UsageError: unreadable, or it wants code run or other weights read."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such model folder", hint="fedsilo model build")
    config = read_json(folder / "config.json")
    if "auto_map" in config:
        # The folder would run its own Python (threat T22).
        raise UsageError(f"{folder}: config.json has auto_map, and code from a model folder is never run")
    if config.get("transformers_weights") is not None:
        raise UsageError(
            f"{folder}: config.json has transformers_weights: its weights would be another file than the one hashed",
            hint="remove the key, and name the file model.safetensors",
        )
    return config


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object of a model folder; empty where it is optional and not there. Raises UsageError, with its name."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(_present(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON, or it cannot be read") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a JSON object")
    return value


def _present(path: Path) -> Path:
    if not path.is_file():
        raise UsageError(f"{path.parent}: the model folder lacks {path.name}", hint="copy the whole folder again")
    return path


def _json_bytes(value: Any) -> bytes:
    """Canonical bytes. Some configs hold integers that RFC 8785 refuses (model_max_length 1e30), hence the fallback."""
    try:
        return canonical_json(value)
    except ValueError:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


TEMPLATE_BYTES_MAX = 1 << 18  # it goes to the trainer in one message of at most 1 MiB
_CLOCK = "strftime_now"  # the one function of transformers' templates that reads anything but its arguments


@dataclass(frozen=True)
class Template:
    """`text` None: as the tokenizer of the model folder has it; empty: plain. `sha256` None with it: the folder's."""

    text: str | None
    sha256: str | None
    source: str
    reads_clock: bool = False


def choice_of(text: str) -> str | Path | None:
    """Read an option of the command line: empty, `chat`, `plain` or the path of a file."""
    return text if text in ("chat", "plain") else Path(text) if text else None


def read_template(choice: str | Path | None, folder: Path) -> Template:
    """Read the template that a site chose.

    Args:
        choice: `data.template`: None, "chat", "plain" or a file.
        folder: of the model.

    Raises:
        NotFoundError: there is no such file.
        UsageError: `chat` where the folder has no chat template; a file that is empty, too large or no UTF-8; the
            folder's tokenizer_config.json is no JSON object.
    """
    if choice == "plain":
        return Template("", sha256_hex(b""), "plain")
    if isinstance(choice, Path):
        try:
            content = choice.read_bytes()
        except FileNotFoundError as error:
            raise NotFoundError(
                f"template {choice} does not exist", hint="data.template: chat, plain or a file"
            ) from error
        except OSError as error:
            raise UsageError(f"template {choice} cannot be read: {error.strerror}") from error
        if not content or len(content) > TEMPLATE_BYTES_MAX:
            raise UsageError(f"template {choice} has {len(content)} bytes; 1 to {TEMPLATE_BYTES_MAX} are right")
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"template {choice} is not UTF-8") from error
        return Template(text, sha256_hex(content), str(choice), _CLOCK in text)
    own = _own_template(folder)
    if choice == "chat" and not own:
        raise UsageError(f"{folder} has no chat template", hint="data.template: plain, or a file with a template")
    return Template(None, None, "chat" if own else "plain", _CLOCK.encode() in own)


def _own_template(folder: Path) -> bytes:
    """The folder's chat template, in a file of its own or among the tokenizer's settings; no bytes: it has none."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_bytes()
    inside = read_json(folder / "tokenizer_config.json", optional=True).get("chat_template", "")
    return inside.encode() if isinstance(inside, str) else _json_bytes(inside)
