"""The Flower app of `benchmarks.transport`: stock FedAvg, and a client that adds its node's constant.

It runs inside Flower's own environment and imports nothing of this project. The server writes one line for each round
into `marks`: the moment in seconds since 1970, and after the last round by how much its numbers have grown.
"""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg


def first(number, shape):
    """What an array begins with: no two alike, as equal content may be sent once; sums of it are exact in float32."""
    return (np.random.default_rng(number).integers(-1024, 1024, shape) / 1024).astype(np.float32)


client = ClientApp()
server = ServerApp()


@client.train()
def train(message, context):
    constant = np.float32(context.node_config["constant"])
    given = message.content["arrays"]
    arrays = ArrayRecord({name: Array(values.numpy() + constant) for name, values in given.items()})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)


@server.main()
def main(grid, context):
    config = context.run_config
    nodes, rounds, marks = int(config["nodes"]), int(config["rounds"]), Path(config["marks"])
    shapes = json.loads(Path(config["shapes"]).read_text())
    begins = ArrayRecord({name: Array(first(number, shape)) for number, (name, shape) in enumerate(shapes)})

    def mark(number, arrays):
        row = {"round": number, "at": time.time()}
        if number == rounds:
            grown = [arrays[name].numpy() - first(number, shape) for number, (name, shape) in enumerate(shapes)]
            row |= {"arrays": len(arrays), "least": min(float(one.min()) for one in grown)}
            row["most"] = max(float(one.max()) for one in grown)
        with marks.open("a") as out:
            out.write(json.dumps(row) + "\n")

    strategy = FedAvg(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes
    )  # fmt: skip
    strategy.start(grid=grid, initial_arrays=begins, num_rounds=rounds, evaluate_fn=mark)
