"""`python -m fedsilo.cli COMMAND ...` for COMMAND fedsilo, silo, coordinator or fedconsole: how one of our
processes starts another without relying on PATH."""

from __future__ import annotations

import sys

from fedsilo.cli import main as cli

_MAINS = {
    "fedsilo": cli.fedsilo_main,
    "silo": cli.silo_main,
    "coordinator": cli.coordinator_main,
    "fedconsole": cli.console_main,
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in _MAINS:
        sys.exit(f"usage: python -m fedsilo.cli {{{','.join(_MAINS)}}} ...")
    _MAINS[sys.argv.pop(1)]()


if __name__ == "__main__":
    main()
