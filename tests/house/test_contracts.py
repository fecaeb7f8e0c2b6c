"""Import contracts: each is kept by the product, and each reports breaches that are planted in a copy of it."""

from __future__ import annotations

import re

import pytest

from tests.house.tree import SETTINGS, Tree

CONTRACTS = {contract["name"]: contract for contract in SETTINGS["tool"]["importlinter"]["contracts"]}

# contract -> (module that the import is planted in, imported module). Modules called `planted` are made: they stand for
# one that somebody adds later. Written by hand, not taken from the contracts, so that a contract cannot lose a word.
BREACHES: dict[str, list[tuple[str, str]]] = {
    "the house: arrows point down": [
        ("silo.planted", "fedsilo.cli"),
        ("silo.guard.gate", "coordinator.store"),
        ("silo.trainer.grpo", "console.feed"),
        ("coordinator.driver", "silo.config"),
        ("coordinator.planted", "console.feed"),
        ("fedsilo.control.client", "coordinator.record"),
        ("console.planted", "silo.link"),
        ("fedsilo.control.planted", "silo.config"),
        ("fedsilo.audit.planted", "fedsilo.control.server"),
        ("fedsilo.grading.planted", "fedsilo.audit.log"),
        ("fedsilo.sandbox.planted", "fedsilo.grading.worker"),
        ("fedsilo.files.planted", "fedsilo.sandbox.probes"),
        ("fedsilo.demo.planted", "fedsilo.cli.output"),
        ("fedsilo.files.durable", "coordinator.blobs"),
        ("policies.engine", "fedsilo.files.durable"),
        ("policies.planted", "certs.names"),
        ("certs.planted", "policies.model"),
        ("certs.identity", "fedsilo.files.durable"),
        ("fedsilo.protocol.method", "policies.engine"),
        ("fedsilo.protocol.planted", "certs.encoding"),
    ],
    "only the gate holds the channel": [
        ("silo.guard.loop", "silo.guard.channel"),
        ("silo.guard.planted", "silo.guard.channel"),
        ("silo.guard.exchange", "silo.guard.channel"),
        ("silo.trainer.worker", "silo.guard.channel"),
        ("fedsilo.cli.planted", "silo.guard.channel"),
    ],
    "the way out never imports private data": [
        ("silo.guard.gate", "silo.trainer.data"),
        ("silo.guard.planted", "silo.trainer.session"),
        ("silo.config", "silo.trainer.data"),
        ("fedsilo.cli.planted", "silo.trainer.worker"),
        ("fedsilo.experiment.running", "silo.trainer.session"),
    ],
    "no party imports an experiment": [
        ("silo.guard.gate", "fedsilo.experiment.cell"),
        ("coordinator.driver", "fedsilo.experiment.results"),
        ("fedsilo.demo.planted", "fedsilo.experiment.cell"),
        ("fedsilo.cli.demo", "fedsilo.experiment.perform"),
    ],
    "private data never imports the way out": [
        ("silo.trainer.data", "silo.guard.gate"),
        ("silo.trainer.planted", "silo.guard.ledger"),
        ("silo.trainer.rollout.planted", "grpc"),
    ],
    "a report to the site itself never imports the way out": [
        ("silo.report.measure", "silo.guard.gate"),
        ("silo.report.alone", "silo.guard.channel"),
        ("silo.report.planted", "fedsilo.control.socket_server"),
        ("silo.report.alone", "grpc"),
    ],
    "every folder has a floor": [("fedsilo.protocol.planted", "fedsilo.files.durable")],
    "the protocol and the rules do no I/O": [
        ("fedsilo.audit.record", "os"),
        ("fedsilo.grading.numeric", "pathlib"),
        *(("fedsilo.protocol.method", name) for name in ("grpc", "os", "pathlib", "random", "socket", "subprocess")),
        *(("fedsilo.protocol.planted", name) for name in ("secrets", "sqlalchemy", "ssl", "sys", "tempfile", "torch")),
        *(("policies.engine", name) for name in ("asyncio", "http", "io", "logging", "os", "urllib")),
        *(("policies.kinds.planted", name) for name in ("fsspec", "pathlib", "shutil", "sqlite3", "threading", "uuid")),
        *(("policies.compare", name) for name in ("ctypes", "multiprocessing", "requests", "select", "signal")),
    ],
    "coordinator, console and command start-up never load torch": [
        ("coordinator.aggregate", "torch"),
        ("console.planted", "transformers"),
        ("fedsilo.cli.main", "torch"),
        ("fedsilo.files.model_folder", "transformers"),
        ("silo.guard.adapters", "torch"),
        ("silo.planted", "torch"),
        ("policies.engine", "torch"),
        ("certs.planted", "torch"),
    ],
    "methods do not know each other": [("fedsilo.protocol.methods.planted", "fedsilo.protocol.methods.pubswap")],
    "grpc lives in four modules": [
        ("silo.guard.gate", "grpc"),
        ("silo.guard.planted", "grpc"),
        ("silo.trainer.worker", "grpc"),
        ("coordinator.planted", "grpc"),
        ("console.feed", "grpc"),
        ("fedsilo.cli.planted", "grpc"),
        ("fedsilo.control.server", "grpc"),
    ],
    "processes are started by six modules only": [
        ("silo.guard.gate", "subprocess"),
        ("silo.guard.planted", "subprocess"),
        ("silo.trainer.planted", "subprocess"),
        ("coordinator.planted", "subprocess"),
        ("fedsilo.cli.main", "subprocess"),
    ],
    "sockets are opened by links and sandboxes only": [
        ("silo.guard.gate", "socket"),
        ("silo.guard.planted", "ssl"),
        ("silo.trainer.session", "socket"),
        ("coordinator.planted", "socket"),
        ("certs.planted", "ssl"),
    ],
    "no party speaks anything but its own protocol": [
        ("silo.guard.planted", "http"),
        ("silo.trainer.session", "requests"),
        ("silo.trainer.data", "huggingface_hub"),
        ("coordinator.planted", "smtplib"),
        ("console.planted", "httpx"),
        ("fedsilo.cli.planted", "wandb"),
        *(("silo.guard.gate", name) for name in ("_posixsubprocess", "_socket", "_ssl", "urllib3")),
        *(("coordinator.driver", name) for name in ("ftplib", "socketserver", "wsgiref", "xmlrpc")),
    ],
    "only the console's web server speaks HTTP": [
        ("fedsilo.control.planted", "aiohttp"),
        ("silo.guard.planted", "aiohttp"),
        ("console.feed", "aiohttp"),
    ],
    "asyncio is the recorder's and the web server's": [
        ("silo.guard.gate", "asyncio"),
        ("silo.trainer.planted", "asyncio"),
        ("coordinator.planted", "asyncio"),
        ("fedsilo.demo.run", "asyncio"),
    ],
    "clients lay out and give commands": [
        ("silo.guard.planted", "fedsilo.control.client"),
        ("silo.guard.gate", "fedsilo.views.overview"),
        ("coordinator.planted", "fedsilo.views.limits"),
    ],
    "no circles": [
        ("console.theme", "console.app"),
        ("fedsilo.views.lines", "fedsilo.views.limits"),
        ("silo.guard.ledger", "silo.guard.gate"),
        ("silo.trainer.quantised", "silo.trainer.decoder"),
    ],
    "the terminal is drawn by the screens only": [
        ("fedsilo.control.client", "textual"),
        ("console.planted", "textual"),
        ("fedsilo.cli.console", "textual"),
    ],
    # the second is indirect: it is the screens that import textual
    "the control client needs no terminal": [("console.feed", "textual"), ("fedsilo.control.client", "console.app")],
}


def test_X11_product_keeps_every_contract(clean_tree: Tree) -> None:
    assert clean_tree.broken_contracts() == {}


@pytest.mark.quick(keep=8)
@pytest.mark.parametrize("name", CONTRACTS)
def test_X11_planted_breaches_are_reported(name: str, tree: Tree) -> None:
    planted = [(tree.plant(importer, f"import {imported}"), imported) for importer, imported in BREACHES[name]]
    report = tree.broken_contracts()[name]
    # module and line stand only in the copy, so the report is not about the installed packages
    arrows = [f"{place.module} -> {imported} (l.{place.line})" for place, imported in planted]
    if CONTRACTS[name]["type"] == "acyclic_siblings":  # it names the arrow of a circle without the line
        siblings = [(place.module.rpartition(".")[2], imported.rpartition(".")[2]) for place, imported in planted]
        arrows = [f".{importer} -> .{imported} (1 import)" for importer, imported in siblings]
    assert not [arrow for arrow in arrows if arrow not in report], report


def test_no_breach_without_a_contract() -> None:
    assert BREACHES.keys() == CONTRACTS.keys()


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_word_of_a_contract_is_planted(name: str) -> None:
    """Else the word could go, and nothing would notice."""
    contract = CONTRACTS[name]
    words = {*contract.get("forbidden_modules", ()), *contract.get("protected_modules", ())}
    planted = [imported for _, imported in BREACHES[name]]
    assert {word for word in words if not any(f"{found}.".startswith(f"{word}.") for found in planted)} == set()


def test_whoever_may_import_does(tree: Tree) -> None:
    """A permission that nobody uses is a hole. With every list of importers emptied, each of them must be reported."""
    settings = tree.root / "pyproject.toml"
    settings.write_text(
        re.sub(r"allowed_importers = \[.*?\]", "allowed_importers = []", settings.read_text(), flags=re.S)
    )
    reports = tree.broken_contracts()
    unused = {
        (name, importer)
        for name, contract in CONTRACTS.items()
        for importer in contract.get("allowed_importers", ())
        if not re.search(rf"- {re.escape(importer)}[. ]", reports[name])
    }
    assert unused == set()
