"""Which shipped ruleset a method runs under: one for each distinct set of message kinds.

A method that is added later needs a file in policies/rulesets only where it sends a set of kinds that no other sends.
"""

from __future__ import annotations

# (methods, ruleset, why there is none where it is empty)
METHOD_RULESETS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        (
            "FedAvg-GRPO",
            "FedProx-GRPO",
            "Public-no-swap",
            "FedIT",
            "FedDPA-LoRA (global pair)",
            "FedPETuning",
        ),
        "fedavg",
        "",
    ),
    (("PubSwap, Balanced",), "pubswap", ""),
    (("PubSwap, Balanced, with A frozen and text screens",), "pubswap-strict", ""),
    (("PubSwap, Random",), "pubswap-random", ""),
    (("FFA-LoRA",), "ffa-lora", ""),
    (("RoLoRA",), "rolora", ""),
    (("FedEx-LoRA",), "fedex", ""),
    (("FLoRA",), "flora", ""),
    (("FedSA-LoRA",), "fedsa-lora", ""),
    (("Fed-SB",), "fed-sb", ""),
    (("FedReFT", "Mean-ABM", "FedAvg on ReFT"), "fedreft", ""),
    (("FedGRPO",), "fedgrpo", ""),
    (("KNEXA-FL",), "knexa", ""),
    (("Random-P2P",), "knexa-random", ""),
    (("Heuristic-P2P",), "knexa-heuristic", ""),
    (("FedID-CentralKD",), "fedid-central", ""),
    (("LocalOnly",), "local-only", ""),
    (("PubSwap, Balanced, with each silo's own adapter (responses-only)",), "responses-only", ""),
    (("Central-KD",), "", "knowledge.logits does not exist"),
    (("DPSDA-FL",), "", "synthetic.examples does not exist: it needs a budget ledger"),
    (("Central-GRPO",), "", "not a federated method"),
)
