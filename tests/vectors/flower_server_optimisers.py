"""Writes flower_server_optimisers.json, by Flower's own strategies, which no environment of this project has:

    python3 -m venv V && V/bin/pip install --no-deps flwr==1.42.0 && V/bin/pip install numpy 'protobuf<7' grpcio ...
    V/bin/python tests/vectors/flower_server_optimisers.py > tests/vectors/flower_server_optimisers.json

Ten rounds; in each another subset of five silos takes part, with equal weights. Flower averages parameters, so each
silo's is the global one plus its difference; `updates` are those differences. `dyadic` values are small multiples of
powers of two, and one, two or four silos take part, so that all arithmetic on them is exact: for FedAdam, whose step
divides, also the mean is one of numbers that it divides exactly, and both betas are 0.

Flower's FedAdam multiplies its rate by sqrt(1 - beta2^(t+1)) / (1 - beta1^(t+1)) in round t, which algorithm 2 of
Reddi et al. 2021 does not have: its rate is set so in each round that this factor goes. Floats are written as hex.
"""

from __future__ import annotations

import json
import sys

import flwr
import numpy as np
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAdam, FedAvgM

ROUNDS, ELEMENTS = 10, 6
GROUPS = ((0, 1, 2, 3, 4), (0, 2), (1,), (1, 3, 4), (0, 1, 2, 4), (3, 4), (2,), (0, 1, 2, 3), (4, 0), (1, 2, 3))
DYADIC_GROUPS = ((0, 1, 2, 3), (0, 2), (1,), (1, 3), (0, 1, 2, 4), (3, 4), (2,), (0, 1, 2, 3), (4, 0), (1, 2))


# D / (|D| + 1/2) of these is exact; and what silos differ by from their mean.
DIVISIBLE = (-3.5, -1.5, -0.5, 0.0, 0.5, 1.5, 3.5)
APART = {1: (0.0,), 2: (0.25, -0.25), 4: (1.0, -1.0, 0.5, -0.5)}


def drawn(name, dyadic):
    draw = np.random.default_rng(17)
    if not dyadic:
        return draw.normal(0, 1, ELEMENTS), draw.normal(0, 0.1, (ROUNDS, 5, ELEMENTS))
    start = draw.integers(-64, 64, ELEMENTS) / 8.0
    updates = draw.integers(-64, 64, (ROUNDS, 5, ELEMENTS)) / 16.0
    if name == "adam":
        means = draw.choice(DIVISIBLE, (ROUNDS, ELEMENTS))
        for number, silos in enumerate(DYADIC_GROUPS):
            for silo, apart in zip(silos, APART[len(silos)], strict=True):
                updates[number][silo] = means[number] + apart
    return start, updates


def played(make, start, updates, groups, before_round=None):
    strategy, theta, after = make(ndarrays_to_parameters([start])), start, []
    for number in range(1, ROUNDS + 1):
        if before_round is not None:
            before_round(strategy, number)
        results = [
            (None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters([theta + updates[number - 1][silo]]), 1, {}))
            for silo in groups[number - 1]
        ]
        parameters, _ = strategy.aggregate_fit(number, results, [])
        theta = parameters_to_ndarrays(parameters)[0]
        after.append(theta)
    return after


def momentum(rate, beta):
    return lambda start: FedAvgM(initial_parameters=start, server_learning_rate=rate, server_momentum=beta)


def adam(eta, beta1, beta2, tau):
    return lambda start: FedAdam(initial_parameters=start, eta=eta, beta_1=beta1, beta_2=beta2, tau=tau)


def without_correction(eta, beta1, beta2):
    def set_rate(strategy, number):
        strategy.eta = eta * (1 - np.power(beta1, number + 1.0)) / np.sqrt(1 - np.power(beta2, number + 1.0))

    return set_rate


CASES = {
    "momentum": (False, {"name": "momentum", "learning_rate": 0.7, "momentum": 0.9}),
    "momentum, dyadic": (True, {"name": "momentum", "learning_rate": 0.5, "momentum": 0.5}),
    "adam": (False, {"name": "adam", "learning_rate": 0.02, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}),
    "adam, dyadic": (True, {"name": "adam", "learning_rate": 0.5, "beta1": 0.0, "beta2": 0.0, "tau": 0.5}),
}


def case(dyadic, fields):
    start, updates = drawn(fields["name"], dyadic)
    groups = DYADIC_GROUPS if dyadic else GROUPS
    if fields["name"] == "momentum":
        after = played(momentum(fields["learning_rate"], fields["momentum"]), start, updates, groups)
    else:
        values = tuple(fields[name] for name in ("learning_rate", "beta1", "beta2", "tau"))
        after = played(adam(*values), start, updates, groups, without_correction(*values[:3]))
    return {
        "dyadic": dyadic,
        "server_optimiser": fields,
        "start": hexed(start),
        "rounds": [
            {"updates": [hexed(updates[number][silo]) for silo in groups[number]], "after": hexed(after[number])}
            for number in range(ROUNDS)
        ],
    }


def hexed(values):
    return [float(value).hex() for value in values]


if __name__ == "__main__":
    cases = {name: case(*given) for name, given in CASES.items()}
    json.dump({"flwr": flwr.__version__, "numpy": np.__version__, "cases": cases}, sys.stdout, indent=0)
    sys.stdout.write("\n")
