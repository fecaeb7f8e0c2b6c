"""`docs/reference/figures.md`, from the table of figures."""

from __future__ import annotations

from fedsilo.control.figures import FIGURES

_HEAD = """\
# Figures of a run

What `fedsilo curves` and the console's place 4 show, by name. A silo's own figures stay at the silo; the coordinator
has pass@1 where a policy releases it, and what it computes itself. More on the
[objective](../explain/objective.md) and on the [proof of the rollout engine](../explain/agreement.md).

`fedsilo curves` prints the last value of each, `fedsilo curves --name kl` each value of one, `fedsilo curves --values`
each value of all; so do `--csv` and `--json`.

| figure | unit | what it says | when |
| --- | --- | --- | --- |
"""


def figures_page() -> str:
    rows = (
        f"| `{name}` | {each.unit} | {each.meaning} | {each.when or 'every step'} |" for name, each in FIGURES.items()
    )
    return _HEAD + "\n".join(rows) + "\n"
