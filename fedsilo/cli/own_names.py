"""Checks that the top-level names that we import are ours alone.

`silo`, `console` or `certs` are words that another distribution, or a folder beside which a command is started, may
bear too; Python would then load a mixture without a word. So every command looks first for the signs of it (a few
milliseconds), what starts a daemon reads all that is installed (about 0.1 s), and both say what to remove. Does not
check that the files are the ones that we shipped.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import util
from pathlib import Path

from fedsilo.protocol.errors import OperationError

DISTRIBUTION = "fedsilo"
TOP_LEVEL_NAMES = ("fedsilo", "silo", "coordinator", "console", "policies", "certs")


def refuse_overwritten() -> None:
    """Look for signs that a name of ours is another's, and only where there is one, at all that is installed.

    The signs: a distribution that bears one of our names, a name that would be loaded from elsewhere, and a package
    whose `__init__.py` is not the empty one that we ship. It does not see a distribution of another name that left
    `__init__.py` alone; `refuse_foreign_names` does.

    Raises:
        OperationError: as `refuse_foreign_names`.
    """
    home = Path(__file__).resolve().parents[2]
    bearing = {f"{name}-" for name in TOP_LEVEL_NAMES if name != DISTRIBUTION}
    if (
        any(
            name[: name.find("-") + 1] in bearing and name.endswith((".dist-info", ".egg-info"))
            for name in _installed()
        )
        or any(found != [home / name] for name, found in _places().items())
        or any((home / name / "__init__.py").stat().st_size for name in TOP_LEVEL_NAMES if name != DISTRIBUTION)
    ):
        refuse_foreign_names()


def refuse_foreign_names() -> None:
    """Look at what is installed and at where each name would be loaded from. Nothing is imported for it.

    Raises:
        OperationError: a name is another distribution's too, or another folder would be loaded.
    """
    from importlib import metadata

    refuse_shared(metadata.packages_distributions())
    refuse_strangers(_places(), home=Path(__file__).resolve().parents[2])


def _installed() -> Iterator[str]:
    """Names of what lies in the folders that Python imports from."""
    for folder in sys.path:
        with contextlib.suppress(OSError):
            yield from (entry.name for entry in Path(folder).iterdir())


def _places() -> dict[str, list[Path]]:
    """The folders that Python would load each of our names from."""
    places = {}
    for name in TOP_LEVEL_NAMES:
        found = util.find_spec(name)
        places[name] = [Path(each).resolve() for each in found.submodule_search_locations or ()] if found else []
    return places


def refuse_shared(owners: Mapping[str, Iterable[str]]) -> None:
    """Refuse a name that more than our distribution installs.

    Args:
        owners: distributions by top-level name, as `importlib.metadata.packages_distributions` gives them; a name
            that no distribution installs (a bare checkout) is fine.

    Raises:
        OperationError: names the name and what to remove.
    """
    for name in TOP_LEVEL_NAMES:
        others = sorted({each for each in owners.get(name, ()) if each != DISTRIBUTION})
        if others:
            raise OperationError(
                f"the package {name!r} is installed by {', '.join(others)} too, and only one of them can be loaded",
                hint=f"pip uninstall {' '.join(others)}; then install FedSilo again, alone (pipx, uv tool, or a venv)",
                code="FOREIGN_PACKAGE",
            )


def refuse_strangers(places: Mapping[str, Iterable[str | Path]], *, home: Path) -> None:
    """Refuse a name that would be loaded from somewhere else than beside our other packages.

    Args:
        places: folders that Python would load each of our names from.
        home: the folder that our packages lie in.

    Raises:
        OperationError: names the folder.
    """
    for name in TOP_LEVEL_NAMES:
        found = [Path(each).resolve() for each in places[name]]
        strangers = [each for each in found if each != home / name]
        if strangers:
            raise OperationError(
                f"the package {name!r} is taken from {strangers[0]}, not from {home}",
                hint="start from a folder without that name, and clear PYTHONPATH",
                code="FOREIGN_PACKAGE",
            )
        if not found:
            raise OperationError(f"there is no package {name!r}", hint="install FedSilo again", code="FOREIGN_PACKAGE")
