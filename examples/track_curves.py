"""Put the figures of a run into MLflow or Weights & Biases: one run there for each silo of a run here.

    fedsilo curves --coordinator coordinator.yaml --json | python track_curves.py mlflow --uri sqlite:///mlflow.db
    fedsilo curves --coordinator coordinator.yaml --json | python track_curves.py wandb --project cardio-net --offline

It reads what `fedsilo curves --json` printed and needs nothing of FedSilo. Given again, it adds what is new. At a silo
the figures are the site's own: they tell something of its private prompts, so choose a server inside the site.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

ALL = "all silos"


def by_silo(data: Mapping[str, Any]) -> dict[str, dict[str, dict[int, float]]]:
    """Silo -> figure -> place on the axis of the run -> value; with the bounds of its interval, where it has one."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for series in data["series"]:
        figures = found[series["silo"] or ALL]
        for point in series["points"]:
            place = int(point["x"])
            figures[series["name"]][place] = float(point["value"])
            for bound in ("low", "high"):
                if point.get(bound) is not None:
                    figures[f"{series['name']}_{bound}"][place] = float(point[bound])
    return found


def to_mlflow(data: Mapping[str, Any], uri: str, experiment: str) -> int:
    """Add the values that its runs do not have yet; returns how many."""
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    known = client.get_experiment_by_name(experiment)
    where = known.experiment_id if known is not None else client.create_experiment(experiment)
    added = 0
    for silo, figures in by_silo(data).items():
        wanted = f"tags.`fedsilo.run` = '{data['run']}' and tags.`fedsilo.silo` = '{silo}'"
        runs = client.search_runs([where], wanted, max_results=1)
        tags = {"fedsilo.run": data["run"], "fedsilo.silo": silo, "mlflow.runName": f"{data['run']} {silo}"}
        run = runs[0] if runs else client.create_run(where, tags=tags)
        for name, values in figures.items():
            there = {each.step for each in client.get_metric_history(run.info.run_id, name)} if runs else set()
            new = [Metric(name, value, 0, place) for place, value in sorted(values.items()) if place not in there]
            for start in range(0, len(new), 1000):  # as many as MLflow takes at once
                client.log_batch(run.info.run_id, metrics=new[start : start + 1000])
            added += len(new)
    return added


def to_wandb(data: Mapping[str, Any], project: str, *, offline: bool) -> int:
    """Hand everything over under the same run ids; the server keeps the steps beyond the last that it has."""
    import wandb

    handed = 0
    for silo, figures in by_silo(data).items():
        run = wandb.init(
            project=project, id=f"{data['run']}-{silo}".replace(" ", "-"), name=f"{data['run']} {silo}",
            resume="allow", mode="offline" if offline else "online", config={"run": data["run"], "silo": silo},
        )  # fmt: skip
        places = sorted({place for values in figures.values() for place in values})
        for place in places:
            row = {name: values[place] for name, values in figures.items() if place in values}
            run.log(row, step=place)
            handed += len(row)
        run.finish()
    return handed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    to = parser.add_subparsers(dest="to", required=True)
    mlflow = to.add_parser("mlflow")
    mlflow.add_argument("--uri", required=True, help="of the tracking server or its store, as sqlite:///mlflow.db")
    mlflow.add_argument("--experiment", default="fedsilo")
    wandb = to.add_parser("wandb")
    wandb.add_argument("--project", default="fedsilo")
    wandb.add_argument("--offline", action="store_true", help="into ./wandb, for `wandb sync`")
    options = parser.parse_args()
    answer = json.load(sys.stdin)
    if not answer["ok"]:
        print(answer["error"]["message"], file=sys.stderr)
        return 1
    data = answer["data"]
    if options.to == "mlflow":
        added = to_mlflow(data, options.uri, options.experiment)
    else:
        added = to_wandb(data, options.project, offline=options.offline)
    print(f"{data['run']}: {added} values")
    return 0


if __name__ == "__main__":
    sys.exit(main())
