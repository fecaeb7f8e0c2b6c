"""Rounds of LoRA factors between real processes, against NVFlare and Flower, alternating:
`python -m benchmarks.transport --json [--sides ours nvflare flower] [--sizes 6.96 69.6] [--silos 4 16] [--light N]
[--rounds 3] [--cycles 1] [--venv-nvflare FOLDER] [--venv-flower FOLDER]`.

392 float32 arrays, 69.6 or 6.96 MB; a trainer that adds a constant, so that every side's mean is checked against a
number by hand. Ours: coordinator and silos with mTLS, gate, hashing and audit on (`transport_ours`). Each peer in an
environment of its own, made as `transport_nvflare` and `transport_flower` say; without one its figures are null.

    n4_seconds, n16_seconds         a round of 69.6 MB, median; from its opening to the next one's
    ratio_nvflare_n4, ..._n16       NVFlare's seconds for a round / ours, 69.6 MB
    ratio_flower_n4                 the same of Flower with 392 arrays; ratio_flower_one_array_n4: the same bytes in one
    cpu_seconds_per_gb              of our server, 69.6 MB, the worse N; GB: 10^9 payload bytes, up and down together
    base_mib, peak_mib_n4, ..._n16  of our server's processes, before a run and at most in it
    least_n4_seconds, ..._n16       what streams and hashes of a round of 69.6 MB alone take here (`least_seconds`), and
    n4_over_least, n16_over_least   how many times as long a round takes: machines differ less in these
    empty_round_seconds             N=4, 14 arrays of 448 bytes in all
    small_...                       the same with 6.96 MB
    light_seconds                   the empty round with as many silos as --light says, of ours
    memory                          of each of our jobs from 69.6 MB on: peak_mib, and bound_mib, base and 4 payloads
    sides                           what each job took; idle: of a server and a client that wait
    limits                          a bare gRPC stream over mTLS, one way; SHA-256

Peers have no gate and no audit log, and Flower no mTLS. Their client is one process, ours is two, and its trainer is
given each adapter twice, since it is measured, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import transport_flower, transport_nvflare, transport_ours
from benchmarks.transport_limits import limits
from benchmarks.transport_payload import EMPTY, SHAPES
from benchmarks.transport_report import (
    FEW,
    LARGE,
    MANY,
    REQUIRED_LEAST,
    REQUIRED_MOST,
    SMALL,
    Job,
    Place,
    figures_of,
    kept_of,
    least_seconds,
    memory_of,
)
from fedsilo.protocol.errors import FedSiloError

SIDES = ("ours", "nvflare", "flower")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    sizes = [size for size in SHAPES if size]
    parser.add_argument("--sizes", nargs="+", type=float, choices=sizes, default=[SMALL, LARGE], help="megabytes")
    parser.add_argument("--silos", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--light", type=int, metavar="N", help="and so many of our silos with next to no payload")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=1, help="of all sides, for each size and number of silos")
    parser.add_argument("--venv-nvflare", type=Path, metavar="FOLDER")
    parser.add_argument("--venv-flower", type=Path, metavar="FOLDER")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep sites, kits and logs here")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended
    root = given.keep or Path(tempfile.mkdtemp(prefix="ft-"))  # short: a socket's path has at most 107 bytes
    try:
        print(json.dumps(measured(given, root)))
    except FedSiloError as error:
        print(f"error: {error.line} [{error.code}]", file=sys.stderr)
        return error.exit_code
    finally:
        if given.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    return 0


def measured(given: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Raises FedSiloError: our own side failed. A peer's failure is told beside its figures."""
    sides, absent = runners(given)
    jobs: dict[Place, list[Job]] = {}
    failed: dict[str, str] = {}
    places = [(EMPTY, FEW), *((size, silos) for size in given.sizes for silos in given.silos)]
    numbers = itertools.count()
    if given.light:
        places.append((EMPTY, given.light))
    for _ in range(given.cycles):
        for megabytes, silos in places:
            for side, run in sides.items():
                if side != "ours" and (megabytes, silos) == (EMPTY, given.light):
                    continue
                place = Place(side, megabytes, silos)
                out = root / str(next(numbers))
                print(f"{place.name} ...", file=sys.stderr, flush=True)
                try:
                    job = run(out, megabytes, silos)
                except FedSiloError as error:
                    if side == "ours":
                        raise
                    failed[place.name] = error.line
                    continue
                finally:
                    if given.keep is None:
                        shutil.rmtree(out, ignore_errors=True)
                jobs.setdefault(place, []).append(job)
                print(json.dumps({place.name: job.row()}), file=sys.stderr, flush=True)
    figures = figures_of(jobs, light=given.light)
    figures["memory"] = memory_of(jobs, {size: shape.payload_bytes for size, shape in SHAPES.items()})
    conditions = {
        "arrays": len(SHAPES[LARGE].arrays()),
        "payload_bytes": {f"{size:g}": shape.payload_bytes for size, shape in SHAPES.items()},
        "rounds": given.rounds, "cycles": given.cycles, "cores": os.cpu_count(), "load_average": os.getloadavg()[0],
        "blas_threads": 1, "absent": absent, "failed": failed, "required_most": REQUIRED_MOST,
        "required_least": REQUIRED_LEAST, "kept": kept_of(figures, SHAPES[LARGE].payload_bytes),
    }  # fmt: skip
    machine, cores = limits(), os.cpu_count() or 1
    for silos in (FEW, MANY):
        least = least_seconds(machine, SHAPES[LARGE].payload_bytes, silos, cores)
        figures[f"least_n{silos}_seconds"] = round(least, 3)
        taken = figures[f"n{silos}_seconds"]
        figures[f"n{silos}_over_least"] = round(taken / least, 2) if taken else None
    figures["sides"] = {place.name: [job.row() for job in found] for place, found in jobs.items()}
    return {"name": "transport", "figures": figures, "limits": machine, "conditions": conditions}


def runners(given: argparse.Namespace) -> tuple[dict[str, Callable[[Path, float, int], Job]], dict[str, str]]:
    """How each side that can be run is run, in the order of turns; and of the others why they cannot."""
    found: dict[str, Callable[[Path, float, int], Job]] = {}
    absent: dict[str, str] = {}

    def ours(out: Path, megabytes: float, silos: int) -> Job:
        return transport_ours.run(out, SHAPES[megabytes], silos, given.rounds)

    def nvflare(out: Path, megabytes: float, silos: int) -> Job:
        return transport_nvflare.run(out, given.venv_nvflare.absolute(), SHAPES[megabytes], silos, given.rounds)

    def flower(out: Path, megabytes: float, silos: int, *, one_array: bool = False) -> Job:
        venv, shape = given.venv_flower.absolute(), SHAPES[megabytes]
        return transport_flower.run(out, venv, shape, silos, given.rounds, one_array=one_array)

    def flower_one_array(out: Path, megabytes: float, silos: int) -> Job:
        return flower(out, megabytes, silos, one_array=True)

    if "ours" in given.sides:
        found["ours"] = ours
    if "nvflare" in given.sides:
        if given.venv_nvflare is not None and (given.venv_nvflare / "bin" / "nvflare").is_file():
            found["nvflare"] = nvflare
        else:
            absent["nvflare"] = "no environment; --venv-nvflare FOLDER, made as benchmarks/transport_nvflare.py says"
    if "flower" in given.sides:
        if given.venv_flower is not None and (given.venv_flower / "bin" / "flower-superlink").is_file():
            found |= {"flower": flower, "flower_one_array": flower_one_array}
        else:
            absent["flower"] = "no environment; --venv-flower FOLDER, made as benchmarks/transport_flower.py says"
    return found, absent


if __name__ == "__main__":
    sys.exit(main())
