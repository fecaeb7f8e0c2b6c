from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.house.tree import Tree, copy_product


@pytest.fixture(scope="session")
def clean_tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """The product as it is. Tests do not write to it."""
    root = tmp_path_factory.mktemp("house")
    copy_product(root)
    return Tree(root)


@pytest.fixture
def tree(clean_tree: Tree, tmp_path: Path) -> Tree:
    """A copy to break."""
    return Tree(Path(shutil.copytree(clean_tree.root, tmp_path / "house")))
