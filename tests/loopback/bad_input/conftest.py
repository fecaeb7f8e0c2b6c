"""The federation that the bad input is put into: made once, copied for each test."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsilo.demo.data import write_digit_folder
from fedsilo.demo.sites import DemoSettings, free_port, make_sites
from fedsilo.demo.tiny_model import cached_model, recipe_for
from tests.loopback.bad_input.place import Place


@pytest.fixture(scope="session")
def origin() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="fs", dir="/tmp") as folder:  # a socket's path must be short
        root = Path(folder)
        data = write_digit_folder(root / "data", 1, silos=2)
        shutil.copytree(cached_model(recipe_for("digits")), root / "model")
        make_sites(
            DemoSettings(
                out=root,
                model=root / "model",
                data=data,
                ruleset="pubswap",
                seed=1,
                rank=4,
                alpha=8.0,
                holds="",
                local_steps=4,
                swap_period=2,
                prompts_per_step=4,
                samples_per_prompt=4,
                learning_rate=1e-3,
            )
        )
        yield Place(root, 0)


@pytest.fixture
def place(origin: Place) -> Iterator[Place]:
    """A copy of its own, with a free port."""
    with tempfile.TemporaryDirectory(prefix="fs", dir="/tmp") as folder:  # a socket's path must be short
        root, port = Path(folder), free_port()
        shutil.copytree(origin.root, root, dirs_exist_ok=True)
        for path in root.glob("*/*.yaml"):
            text = path.read_text().replace(str(origin.root), str(root))
            text = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", text)
            if path.name == "silo.yaml":
                # The charter names files of the folder that was copied, and these tests change what a site's own say.
                text = re.sub(r"^charter(_sha256)?: .*\n", "", text, flags=re.M)
            path.write_text(text)
        yield Place(root, port)


_ports: dict[Path, int] = {}
