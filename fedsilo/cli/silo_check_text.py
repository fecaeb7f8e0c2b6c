"""What `silo check` prints of a site's prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsilo.cli.output import table

if TYPE_CHECKING:
    from silo.guard.checks import Preview

_LABELS = {"private": "private", "public": "public", "held_out": "held-out"}
TOPICS_SHOWN_MAX = 12


def prompts_text(found: Preview) -> str:
    """Lengths of the three sets, their topics, and the prompts that were asked for, each as the model reads it."""
    rows = [
        (_LABELS[name], str(each.rows), *map(str, each.prompt_tokens or "-----"), _answers(each.answer_tokens))
        for name, each in found.sets.items()
    ]
    text = "\n\ntokens of a prompt\n" + table(
        ("set", "rows", "least", "median", "90 %", "99 %", "most", "answer, median to most"), rows
    )
    topics = sorted({topic for each in found.sets.values() for topic in each.topics})
    shown = [
        (topic[:40], *(str(each.topics.get(topic, 0)) for each in found.sets.values()))
        for topic in topics[:TOPICS_SHOWN_MAX]
    ]
    text += "\n\nrows by topic\n" + table(("topic", *(_LABELS[name] for name in found.sets)), shown)
    if len(topics) > TOPICS_SHOWN_MAX:
        text += f"\nand {len(topics) - TOPICS_SHOWN_MAX} more topics"
    for each in found.prompts:
        text += f"\n\n--- {each.id[:80]}, {each.file}:{each.line}, {each.tokens} tokens, as the model reads it"
        text += "".join(f"\n| {line}" for line in each.text.split("\n"))
    return text


def _answers(tokens: tuple[int, ...]) -> str:
    return f"{tokens[1]} to {tokens[4]}" if tokens else "-"
