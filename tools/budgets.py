"""The weight of the product against what it may be: `python -m tools.budgets [--json | --write]`.

Prints each figure with what it was at commit 5c7e7d9, the ceiling that `tests/house/test_budgets.py` holds it to, and
the target. `tools/budgets.json` has the table. `--write` lowers ceilings to where the figures have come; nothing here
raises one.

What features built since then weigh is in `added`, each by its name, and raises a ceiling by as much: the product may
grow by what it does more, and by nothing else (docs/decisions/0023-budgets-and-features.md).

What is counted is said in `tools/source_counts.py` and, of the paths, in `tools/call_paths.py`. The targets were set
with figures of 5c7e7d9 that another counter found (`judged`). Where this one differs (`before`), a target keeps its
ratio. It differs as `any_dicts` counts every occurrence and not the lines that hold one, as floors are modules and not
the arrows between them, and as paths end where the channel begins.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field, replace

from tools.call_paths import in_fresh_process
from tools.source_counts import ROOT, floor_figures, source_figures

TABLE = ROOT / "tools" / "budgets.json"
FIGURES = (
    "modules",
    "lines",
    "delta_files",
    "delta_lines",
    "response_files",
    "adapter_files",
    "private_step_files",
    "guard_floors",
    "console_floors",
    "any_dicts",
    "fmt_skips",
    "test_lines",
)
FURTHER = (
    "delta_changes",
    "response_lines",
    "response_changes",
    "adapter_lines",
    "adapter_changes",
    "private_step_functions",
)
# An ordinary commit moves a large count by a little; a new ceiling leaves room for half of what may stay below it.
SLACK = 0.01
ROOM = 0.005


@dataclass(frozen=True)
class Budget:
    """One figure's limits.

    Attributes:
        judged: what it was held to be at 5c7e7d9 when the target was set.
        aim: the target then.
        before: what this counter finds at 5c7e7d9.
        ceiling: the most it may be today, without what was added.
        added: what features that came later weigh, by their names.
    """

    judged: int
    aim: int
    before: int
    ceiling: int
    added: dict[str, int] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        return self.ceiling + sum(self.added.values())

    @property
    def target(self) -> int:
        return round(self.aim * self.before / self.judged)

    def fault(self, figure: int) -> str:
        """Return what is wrong with a figure, or nothing."""
        if figure > self.limit:
            return f"is {figure}, above its ceiling of {self.limit}"
        if figure < self.limit - int(self.limit * SLACK):
            return f"is {figure}, so its ceiling of {self.limit} can be lowered: python -m tools.budgets --write"
        return ""

    def lowered(self, figure: int) -> int:
        """Return the ceiling that this figure allows, which is never above today's."""
        return min(self.ceiling, figure - sum(self.added.values()) + int(figure * ROOM))


def figures() -> dict[str, int]:
    """Count everything. The same checkout gives the same figures."""
    paths = {f"{path}_{name}": value for path, each in in_fresh_process().items() for name, value in each.items()}
    counted = {**source_figures(), **floor_figures(), **paths}
    return {name: counted[name] for name in (*FIGURES, *FURTHER)}


def budgets() -> dict[str, Budget]:
    return {name: Budget(**row) for name, row in json.loads(TABLE.read_text()).items()}


def write(rows: dict[str, Budget]) -> None:
    """Write the table with a row on each line."""
    plain = {name: {key: value for key, value in asdict(row).items() if value != {}} for name, row in rows.items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in plain.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def lower(counted: dict[str, int]) -> dict[str, Budget]:
    """Return the table with the ceilings that these figures allow."""
    return {name: replace(row, ceiling=row.lowered(counted[name])) for name, row in budgets().items()}


def as_table(counted: dict[str, int]) -> str:
    """Return the figures for people to read. Both first columns are of 5c7e7d9: as judged then, as counted here."""
    lines = [f"{'':24}{'judged':>10}{'5c7e7d9':>10}{'today':>10}{'ceiling':>10}{'target':>10}"]
    for name, row in budgets().items():
        values = (row.judged, row.before, counted[name], row.limit, row.target)
        fault = "  !" if row.fault(counted[name]) else ""
        lines.append(f"{name:24}" + "".join(f"{value:>10,}" for value in values) + fault)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures alone, as JSON")
    parser.add_argument("--write", action="store_true", help="lower the ceilings to what the figures allow")
    options = parser.parse_args()
    counted = figures()
    if options.write:
        write(lower(counted))
    if options.json:
        report = {part: {name: counted[name] for name in names} for part, names in _PARTS.items()}
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write(as_table(counted))


_PARTS = {"figures": FIGURES, "further": FURTHER}

if __name__ == "__main__":
    main()
