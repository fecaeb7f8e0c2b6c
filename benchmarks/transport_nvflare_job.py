"""The NVFlare job of `benchmarks.transport`, run by the python of NVFlare's own environment:

    PYTHON benchmarks/transport_nvflare_job.py FOLDER --shapes shapes.json --sites N --rounds R

It writes FOLDER/transport: stock FedAvg (aggregation as results come in), and at each site an
in-process script that adds its constant. The module is also the job's own code, so it imports nothing of this project.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.workflows.fedavg import FedAvg

SCRIPT = """\
import argparse

import numpy as np
import nvflare.client as flare

parser = argparse.ArgumentParser()
parser.add_argument("--constant", type=float, required=True)
constant = np.float32(parser.parse_args().constant)
flare.init()
while flare.is_running():
    model = flare.receive()
    if model is None:
        break
    params = {name: values + constant for name, values in model.params.items()}
    flare.send(flare.FLModel(params=params, params_type="FULL"))
"""


def first(number, shape):
    """What an array begins with: no two alike, as equal content may be sent once; sums of it are exact in float32."""
    return (np.random.default_rng(number).integers(-1024, 1024, shape) / 1024).astype(np.float32)


class ConstantFedAvg(FedAvg):
    """Begins with arrays of the wanted shapes; writes what each round came to as numpy does, and at the end by how much
    the numbers of each array have grown, at least and at most."""

    def __init__(self, shapes, ranges, num_clients, num_rounds):
        # all by name: what a job's configuration is made of are the named arguments
        super().__init__(
            persistor_id="", save_filename="model.npz", num_clients=num_clients, num_rounds=num_rounds
        )  # fmt: skip
        self.shapes = shapes  # [[name, shape]]: a dot in a key of a job's configuration would make a tree of it
        self.ranges = ranges

    def load_model(self):
        return FLModel(params={name: first(number, shape) for number, (name, shape) in enumerate(self.shapes)})

    def save_model_file(self, model, filepath):
        np.savez(filepath, **model.params)
        self.last = model.params

    def run(self):
        super().run()  # the end of the last round is said in here
        ranges = {}
        for number, (name, shape) in enumerate(self.shapes):
            grown = self.last[name] - first(number, shape)
            ranges[name] = [float(grown.min()), float(grown.max())]
        Path(self.ranges).write_text(json.dumps(ranges))


def main():
    from nvflare.fuel.utils.constants import FrameworkType
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.script_runner import ScriptRunner

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", type=Path, required=True)
    parser.add_argument("--sites", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument(
        "--unit", type=float, required=True, help="the constant of the first site; of the n-th, n times"
    )
    given = parser.parse_args()
    script = given.folder / "transport_script.py"
    script.write_text(SCRIPT)
    from transport_nvflare_job import ConstantFedAvg as Controller  # by the name it has in the job's own code

    job = FedJob(name="transport", min_clients=given.sites)
    shapes = json.loads(given.shapes.read_text())
    ranges = str(given.folder / "ranges.json")
    job.to(Controller(shapes, ranges, num_clients=given.sites, num_rounds=given.rounds), "server")
    for site in range(1, given.sites + 1):
        runner = ScriptRunner(
            str(script), f"--constant {site * given.unit!r}", framework=FrameworkType.NUMPY,
        )  # fmt: skip
        job.to(runner, f"site-{site}")
    job.export_job(str(given.folder))


if __name__ == "__main__":
    main()
