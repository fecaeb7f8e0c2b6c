"""What `coordinator init` writes: the bundle for the sites, the configuration, the charter and the LoRA schema.

The charter is the coordinator's own policy in the sites' schema, from the same shipped ruleset: what a site may send
at most is what the coordinator takes at most. The bundle carries it, so that each site can put it beside its own
policy, which it can only tighten (D8).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.config import load_config
from fedsilo.files.durable import FOLDER_MODE, undone_on_failure, write_durably
from fedsilo.files.identity_files import load_coordinator_key, read_public
from fedsilo.files.model_facts import read_model_facts
from fedsilo.files.model_folder import read_fingerprints, read_template
from fedsilo.files.site_policy import SiteInputs, make_site_policy, within_context
from fedsilo.files.task_files import read_tasks
from fedsilo.protocol.errors import ConflictError, OperationError
from policies.load import load_policy
from policies.render import PlanSize


@dataclass(frozen=True)
class InitInputs:
    """Inputs of `coordinator init`.

    Attributes:
        directory: gets federation.json, coordinator.yaml, charter.yaml and lora_schema.json; holds `id/`.
        coordinator: its name; `id/<name>.crt` and so on must be there.
        listen: host:port to serve on; port 0 takes a free one at each start.
        advertise: host:port that the sites dial; by default `listen`.
        size: of the largest plan this federation means to run. It travels in the bundle, and every site's limits follow
            from it unless the site says otherwise. No longer answers than the model's context.
        least_isolation: of a trainer, that the charter demands of every site. `waived` leaves it to each.
        server_optimisers: that the charter lets plans move the adapter by; each site's own policy must, too.
    """

    directory: Path
    federation: str
    silos: tuple[str, ...]
    model: Path
    public: Path
    held_out: Path
    verifier: str
    now_seconds: float
    coordinator: str = "main"
    listen: str = "127.0.0.1:8443"
    advertise: str = ""
    ruleset: str = "pubswap"
    load: str = "fp32"
    rank: int = 32
    alpha: float = 64.0
    targets: str = "all-linear"
    dtype: str = ""  # of updates; empty takes the ruleset's own, or float32
    state_dir: Path = Path("state")
    size: PlanSize = field(default_factory=PlanSize)
    least_isolation: str = "waived"
    template: str | Path | None = None  # as `data.template` of a silo; None: the model folder's
    server_optimisers: tuple[str, ...] = ()


def init_coordinator(inputs: InitInputs, *, force: bool = False) -> dict[str, Any]:
    """Write the four files; returns their places and the digests that people compare.

    Raises:
        ConflictError: a file exists and `force` is not given.
        FedSiloError: identity, model folder or a task file is missing or wrong. Then nothing has been written.
    """
    here = inputs.directory
    places = {
        "bundle": here / "federation.json",
        "config": here / "coordinator.yaml",
        "charter": here / "charter.yaml",
        "schema": here / "lora_schema.json",
    }
    for place in places.values():
        if place.exists() and not force:
            raise ConflictError(f"{place} exists already", hint="give --force to replace it")
    size = within_context(inputs.size, read_model_facts(inputs.model))
    bundle = {
        "federation": inputs.federation,
        "coordinator_spiffe_id": f"spiffe://{inputs.federation}/coordinator/{inputs.coordinator}",
        "coordinator_address": inputs.advertise or inputs.listen,
        "coordinator_signing_key_hex": load_coordinator_key(here / "id" / "coordinator.pub").public_bytes_raw().hex(),
        "federation_ca_pem": read_public(here / "id" / "federation_ca.crt").decode("ascii"),
        "peers": [f"spiffe://{inputs.federation}/silo/{silo}" for silo in inputs.silos],
        "plan_size": size.to_json(),
        "load": inputs.load,
    }
    made = make_site_policy(
        SiteInputs(
            ruleset=inputs.ruleset,
            model=inputs.model,
            public=inputs.public,
            held_out=inputs.held_out,
            bundle=places["bundle"],
            now_seconds=inputs.now_seconds,
            site=inputs.coordinator,
            schema_file=places["schema"].name,
            rank=inputs.rank,
            alpha=inputs.alpha,
            targets=inputs.targets,
            dtype=inputs.dtype,
            first_rounds=0,
            least_isolation=inputs.least_isolation,
            template=inputs.template,
            server_optimisers=inputs.server_optimisers,
        ),
        bundle,
    )
    charter = load_policy(made.policy_text.encode(), str(places["charter"]))
    bundle |= {"charter": made.policy_text, "charter_sha256": charter.digest}
    written = {
        "bundle": json.dumps(bundle, indent=1).encode() + b"\n",
        "schema": made.schema_text,
        "charter": made.policy_text.encode(),
        "config": _config_text(inputs).encode(),
    }
    try:
        here.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(f"cannot create {here}: {error.strerror}") from error
    with undone_on_failure(here, places.values()):
        for name, content in written.items():
            write_durably(places[name], content)
        load_config(places["config"])  # what was given for it is judged now, not at the first start
    return {
        **{name: str(place) for name, place in places.items()},
        "schema_sha256": made.schema.digest,
        "charter_sha256": charter.digest,
        "plan_size": size.to_json(),
    }


def _config_text(inputs: InitInputs) -> str:
    prints = read_fingerprints(inputs.model)
    template = read_template(inputs.template, inputs.model).sha256 or prints.template_sha256
    name = inputs.coordinator
    return f"""\
# The coordinator of {inputs.federation}. Written by `coordinator init`; unknown keys are errors.
# Relative paths are taken from this file's folder, sockets from state_dir.
coordinator: {name}
federation: {inputs.federation}
listen: {_text(inputs.listen)}                # port 0 takes a free one
state_dir: {_text(str(inputs.state_dir))}
identity:
  certificate: id/{name}.crt
  key: id/{name}.key                          # mode 0600
  signing_key: id/{name}.ed25519              # mode 0600; every site pins its public half
  federation_ca: id/federation_ca.crt         # vouches for silos
  site_ca: id/site_ca.crt                     # vouches for the people of this site
  operators: id/roles.yaml                    # who may submit, start and abort runs
charter: charter.yaml                         # what is taken in, by the sites' own rules
silos: [{", ".join(inputs.silos)}]            # aggregation follows this order
expected:                                     # a silo that differs is refused at join, with both values
  base_model: {_text(inputs.model.name)}      # a name for people, written into the adapter folder
  base_model_sha256: {_text(prints.base_model_sha256)}
  tokenizer_sha256: {_text(prints.tokenizer_sha256)}
  template_sha256: {_text(template)}
  load: {inputs.load}                         # fp32 | bf16 | nf4 | fp8
  lora_schema: lora_schema.json
public:                                       # this copy checks the answers that silos send
  path: {_text(str(inputs.public.absolute()))}
  sha256: {_text(read_tasks(inputs.public).sha256)}
  verifier: {inputs.verifier}
held_out:
  sha256: {_text(read_tasks(inputs.held_out).sha256)}
"""


def _text(value: str) -> str:
    # a JSON string is a YAML string: nothing in a path can become something else
    return json.dumps(value)
