"""A toy task that a federation can learn on a CPU: a small network with frozen weights, adapted by LoRA factors.

Two frozen layers, fitted to another distribution of inputs than the one the silos have; each silo has its own share of
the classes and its own shift of the inputs, so that no silo alone does as well as all together. Adam with a fresh state
each round, as the trainer has it, whose step size is what the rulesets' norm limits are computed from.

What it does not stand for: a language model. It shows what a limit does to an attack, not how large an adapter's
accuracy drop will be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsilo.protocol.codec import Array
from fedsilo.protocol.randomness import generator, seed_of

INPUTS, HIDDEN, CLASSES, RANK = 16, 32, 6, 4
SCALE = 2.0
RECORDS, TEST_RECORDS = 240, 2000
BATCH, STEPS, LEARNING_RATE = 32, 20, 0.01
TARGET = 0  # the class that the backdoor's trigger stands for
TRIGGER = ((0, 4.0), (1, -4.0))  # inputs that the trigger sets, four standard deviations out
SPREAD = 1.1  # of the inputs of a class, where the class means are 1 apart in each input
SHARES = 1.0  # Dirichlet concentration of each silo's classes: most silos lack a class or two
BETAS, EPSILON = (0.9, 0.999), 1e-8

FIRST, SECOND = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
SHAPES = (
    (f"{SECOND}.lora_A", (RANK, HIDDEN)),
    (f"{SECOND}.lora_B", (CLASSES, RANK)),
    (f"{FIRST}.lora_A", (RANK, INPUTS)),
    (f"{FIRST}.lora_B", (HIDDEN, RANK)),
)
Factors = Mapping[str, Array]


@dataclass(frozen=True)
class Records:
    inputs: Array  # [records, INPUTS]
    labels: Array  # [records], integers

    def poisoned(self, share: float, draw: np.random.Generator) -> Records:
        """With the trigger, and the target's label, on a share of them."""
        chosen = draw.random(len(self.labels)) < share
        return Records(
            np.where(chosen[:, None], triggered(self.inputs), self.inputs), np.where(chosen, TARGET, self.labels)
        )


def triggered(inputs: Array) -> Array:
    changed = inputs.copy()
    for place, value in TRIGGER:
        changed[:, place] = value
    return changed


class Task:
    """Args:
    seed: of everything drawn here.
    silos: how many have records.
    """

    def __init__(self, seed: int, silos: int) -> None:
        draw = generator(seed_of(seed, "poisoning task"))
        self._means = draw.normal(0, 1, (CLASSES, INPUTS))
        elsewhere = draw.normal(0, 1, (CLASSES, INPUTS))
        self._first = draw.normal(0, 1 / np.sqrt(INPUTS), (HIDDEN, INPUTS))
        # the frozen output layer is fitted to class means that only partly are the federation's
        labels = draw.integers(0, CLASSES, TEST_RECORDS)
        inputs = (0.3 * self._means + elsewhere)[labels] + draw.normal(0, SPREAD, (TEST_RECORDS, INPUTS))
        hidden = np.maximum(inputs @ self._first.T, 0)
        self._second = np.linalg.lstsq(hidden, np.eye(CLASSES)[labels], rcond=None)[0].T
        self.silos = [self._records(draw, draw.dirichlet([SHARES] * CLASSES), RECORDS, 0.3) for _ in range(silos)]
        self.test = self._records(draw, np.full(CLASSES, 1 / CLASSES), TEST_RECORDS, 0.0)

    def _records(self, draw: np.random.Generator, shares: Array, count: int, shift: float) -> Records:
        labels = draw.choice(CLASSES, size=count, p=shares)
        offset = draw.normal(0, shift, INPUTS) if shift else np.zeros(INPUTS)
        return Records(self._means[labels] + offset + draw.normal(0, SPREAD, (count, INPUTS)), labels)

    def accuracy(self, factors: Factors) -> float:
        """Share of right answers on records of no silo, all classes alike."""
        return float((self._answers(factors, self.test.inputs) == self.test.labels).mean())

    def backdoor(self, factors: Factors) -> float:
        """Share of records of another class that the trigger makes the target's."""
        others = self.test.inputs[self.test.labels != TARGET]
        return float((self._answers(factors, triggered(others)) == TARGET).mean())

    def _answers(self, factors: Factors, inputs: Array) -> Array:
        with np.errstate(all="ignore"):  # without limits an attack may drive the factors to infinity
            answers: Array = self._forward({n: v.astype(np.float64) for n, v in factors.items()}, inputs)[2].argmax(1)
        return answers

    def _forward(self, factors: Factors, inputs: Array) -> tuple[Array, Array, Array]:
        first = self._first + SCALE * factors[f"{FIRST}.lora_B"] @ factors[f"{FIRST}.lora_A"]
        second = self._second + SCALE * factors[f"{SECOND}.lora_B"] @ factors[f"{SECOND}.lora_A"]
        hidden = np.maximum(inputs @ first.T, 0)
        return hidden, second, hidden @ second.T

    def trained(self, base: Factors, records: Records, draw: np.random.Generator) -> dict[str, Array]:
        """One round at a silo: the difference that STEPS steps of Adam make to the factors, float32."""
        factors = {name: values.astype(np.float64) for name, values in base.items()}
        first_moment = {name: np.zeros(shape) for name, shape in SHAPES}
        second_moment = {name: np.zeros(shape) for name, shape in SHAPES}
        with np.errstate(all="ignore"):
            for step in range(1, STEPS + 1):
                rows = draw.integers(0, len(records.labels), BATCH)
                for name, slope in self._slopes(factors, records.inputs[rows], records.labels[rows]).items():
                    first_moment[name] += (1 - BETAS[0]) * (slope - first_moment[name])
                    second_moment[name] += (1 - BETAS[1]) * (slope**2 - second_moment[name])
                    mean, square = (
                        first_moment[name] / (1 - BETAS[0] ** step),
                        second_moment[name] / (1 - BETAS[1] ** step),
                    )
                    factors[name] -= LEARNING_RATE * mean / (np.sqrt(square) + EPSILON)
            return {name: (factors[name] - base[name]).astype(np.float32) for name in factors}

    def _slopes(self, factors: Factors, inputs: Array, labels: Array) -> dict[str, Array]:
        """Of the mean cross-entropy of a softmax, by factor."""
        hidden, second, logits = self._forward(factors, inputs)
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        shares[np.arange(len(labels)), labels] -= 1
        slope_logits = shares / len(labels)
        of_second = SCALE * slope_logits.T @ hidden  # [CLASSES, HIDDEN]
        of_first = SCALE * ((slope_logits @ second) * (hidden > 0)).T @ inputs  # [HIDDEN, INPUTS]
        return {
            f"{FIRST}.lora_A": factors[f"{FIRST}.lora_B"].T @ of_first,
            f"{FIRST}.lora_B": of_first @ factors[f"{FIRST}.lora_A"].T,
            f"{SECOND}.lora_A": factors[f"{SECOND}.lora_B"].T @ of_second,
            f"{SECOND}.lora_B": of_second @ factors[f"{SECOND}.lora_A"].T,
        }
