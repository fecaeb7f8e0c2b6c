r"""`math`: two answers agree when they denote the same mathematical object, exactly (no rounding, no tolerance).

The answer is taken out of the response (extraction.py), its layout removed (layout.py), then numbers are compared as
fractions, lists, tuples, intervals and matrices member by member, and the rest symbolically, which alone
loads sympy. What this does not do: evaluate huge powers, factorials, sums or integrals; such an answer counts as wrong
unless it is the reference, letter by letter.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import product
from math import inf
from typing import Any

from fedsilo.grading import layout, numeric
from fedsilo.grading.extraction import HIDDEN, CutOff, after_last_cue, final_boxed, last_is_taken_back, outside_thinking
from fedsilo.grading.verdict import BAD_REFERENCE, NO_ANSWER, TOO_COSTLY, Verdict, judged

CHARACTERS_MAX = 400
EXPONENTS_PRODUCT_MAX = 2_000
DIGITS_MAX = 60
NESTING_MAX = 12
_PRECISION_DIGITS = 40
_COSTLY = re.compile(
    r"!|\\(?:sum|prod|int|iint|oint|lim|binom|dbinom|Gamma|zeta|mod|bmod|pmod|begin|operatorname)(?![a-z])"
)
_ALLOWED = re.compile(r"[A-Za-z0-9\s+\-*/^_{}()\[\]\\.,|<>=%]*")
# what a parser may drop without a word, such as \phantom, is not on the list
_COMMANDS = re.compile(
    r"frac|sqrt|cdot|times|div|pi|infty|pm|mp|ln|log|exp|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh"
    r"|alpha|beta|gamma|delta|(?:var)?epsilon|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi|chi|psi"
    r"|omega|Gamma|Delta|Theta|Lambda|Xi|Phi|Psi|Omega|le|ge|lfloor|rfloor|lceil|rceil|vert|mid|[{}|]"
)
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|exp"
FACTORIAL_MAX = 20
SYMBOLIC_EXPONENTS_MAX = 4
GROWING_MAX = 3  # exponentials beside each other; one within another is refused by its exponent or bracket
_GROWING = re.compile(r"\\(?:exp|sinh|cosh|tanh)(?![a-z])|(?<![A-Za-z\\])e\s*\^")
_GROWING_WITHIN = re.compile(r"\\(?:exp|sinh|cosh|tanh)\s*[({][^)}]*(?:\\(?:exp|sinh|cosh|tanh)|\^)")
BINOMIAL_MAX = 60
# a letter may bear a subscript, with or without an exponent before it; the parser drops others without a word
_BEARS_SUBSCRIPT = re.compile(
    r"(?:(?<![}\]^A-Za-z])\{([A-Za-z])\}|(?<!\\)([A-Za-z']))(?:\s*\^\s*(?:\w|\{[^{}]*\}))?(?=\s*_)"
)
_MISPLACED_SUBSCRIPT = re.compile(rf"(?:^|[^A-Za-z'\s]|\\(?:{_FUNCTIONS.replace('|log|', '|')}))\s*_")
_EXPONENT = re.compile(r"\^\s*(?:\{\s*\(?\s*(-?\d+)(?:\s*/\s*\d+)?\s*\)?\s*\}|(\d+))")
_SYMPY_FAILS = (ValueError, TypeError, ArithmeticError, AttributeError, LookupError, RuntimeError, AssertionError)


class TooCostly(Exception):  # a verdict, not an error
    """The text is outside the limits and was not parsed."""


class Unreadable(Exception):  # a verdict, not an error
    """The text holds a command or a character that stands in no answer, and was not parsed."""


def to_latex(text: str) -> str:
    r"""Plain notation made LaTeX: `2*x**2` -> `2 \cdot x^{2}`, `sqrt(3)` -> `\sqrt{3}`, 0.5 -> \frac{5}{10}."""
    plain = re.sub(r"(?<![\d.!)}])(\d{1,2})\s*!(?![!=])", _small_factorial, text.replace("**", "^"))
    plain = re.sub(r"\\[dt]?binom\s*\{\s*(\d{1,2})\s*\}\s*\{\s*(\d{1,2})\s*\}", _small_binomial, plain)
    plain = re.sub(rf"(?<![A-Za-z\\])({_FUNCTIONS})(?=\s*[(\d\\{{^]|\s+[a-z](?![a-z]))", r"\\\1 ", plain)
    plain = re.sub(r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", plain)
    plain = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", plain)
    # letters in a row are factors; the parser would take some rows for one name
    plain = re.sub(r"(?<![A-Za-z\\])[A-Za-z]{2,4}(?![A-Za-z])", lambda run: " ".join(run[0]), plain)
    plain = re.sub(r"\^\s*(-?\d+)", r"^{\1}", plain)
    plain = re.sub(r"\^\s*\(([^()]*)\)", r"^{(\1)}", plain)
    plain = plain.replace("*", " \\cdot ")
    plain = re.sub(r"(?<=[\d])%", r" \\cdot \\frac{1}{100}", plain)
    return re.sub(
        r"(?<![\d.])(\d*)\.(\d+)", lambda found: f"\\frac{{{found[1] or 0}{found[2]}}}{{1{'0' * len(found[2])}}}", plain
    )


def _small_factorial(match: re.Match[str]) -> str:
    return f"({math.factorial(int(match[1]))})" if int(match[1]) <= FACTORIAL_MAX else match[0]


def _small_binomial(match: re.Match[str]) -> str:
    above, below = int(match[1]), int(match[2])
    return f"({math.comb(above, below)})" if above <= BINOMIAL_MAX else match[0]


def require_cheap(latex: str) -> None:
    """Refuse a text that would take too long. Raises TooCostly, Unreadable."""
    if len(latex) > CHARACTERS_MAX or _COSTLY.search(latex):
        raise TooCostly
    if _ALLOWED.fullmatch(latex) is None or _has_misplaced_subscript(latex):
        raise Unreadable
    if any(_COMMANDS.fullmatch(name) is None for name in _COMMAND.findall(latex)):
        raise Unreadable
    if len(_GROWING.findall(latex)) > GROWING_MAX or _GROWING_WITHIN.search(latex):
        raise TooCostly
    product = 1
    cost = 0
    for match in _EXPONENT.finditer(latex):
        cost += 1
        product *= max(1, abs(int((match.group(1) or match.group(2))[:9])))
    if product > EXPONENTS_PRODUCT_MAX or _depth(latex) > NESTING_MAX:
        raise TooCostly
    # an exponent that is not a written number may be anything, but not with another one above or below it
    if re.search(r"\^\s*\{[^{}]*\}\s*\^", latex):
        raise TooCostly
    if latex.count("^") - cost > SYMBOLIC_EXPONENTS_MAX:
        raise TooCostly
    if latex.count("^") > cost and re.search(r"\^\s*\{[^{}]*\^", latex):
        raise TooCostly
    if latex.count("^") > cost and re.search(r"\^\s*\{[^{}]*\d{3,}", latex):
        raise TooCostly
    if any(len(digits) > DIGITS_MAX for digits in re.findall(r"\d+", latex)):
        raise TooCostly


def _has_misplaced_subscript(latex: str) -> bool:
    """A subscript at a number, a bracket or a function other than the logarithm: a base, or nothing that is known."""
    plain = _BEARS_SUBSCRIPT.sub(lambda found: found[1] or found[2], latex)
    return _MISPLACED_SUBSCRIPT.search(plain) is not None or "__" in latex


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest


def parse(text: str) -> Any:
    """A sympy expression, or None when the text is none.

    Raises:
        TooCostly: outside the limits. Unreadable: holds what stands in no answer.
    """
    latex = to_latex(text)
    require_cheap(latex)
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig
    from math_verify import parse as parse_latex

    plain = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="all", equations=False
    )
    config = LatexExtractionConfig(boxed_match_priority=0, normalization_config=plain)
    parsed = parse_latex(
        f"\\boxed{{{latex}}}", extraction_config=[config], fallback_mode="no_fallback", parsing_timeout=None
    )
    if not parsed or not hasattr(parsed[0], "free_symbols"):
        return None
    return parsed[0]


def _without_capitals(gold: str, got: str) -> tuple[str, str]:
    """Both texts with capital variables replaced by small letters that neither has: the parser knows no capitals.

    Raises:
        TooCostly: there are more of them than letters.
    """
    letters = set("".join(re.sub(r"\\[A-Za-z]+", " ", text) for text in (gold, got)))
    capitals = sorted(letter for letter in letters if "A" <= letter <= "Z")
    free = [letter for letter in "abcfghjklmnopqrstuvwxyz" if letter not in letters]
    if len(capitals) > len(free):
        raise TooCostly
    small = dict(zip(capitals, free, strict=False))
    return (
        re.sub(r"\\[A-Za-z]+|[A-Z]", lambda found: small.get(found[0], found[0]), gold),
        re.sub(r"\\[A-Za-z]+|[A-Z]", lambda found: small.get(found[0], found[0]), got),
    )


def _is_endless(text: str) -> bool:
    r"""Infinity is a bound, and nothing to calculate with: `1/\infty` is no number."""
    return "infty" in text


def same(gold: str, got: str) -> bool:
    """Return whether the two texts denote the same expression. What cannot be parsed, or is not finite, equals nothing.

    Raises:
        TooCostly: one of them is outside the limits. Unreadable: the second holds what stands in no answer.
    """
    if _is_endless(gold) != _is_endless(got):
        return False
    gold, got = _without_capitals(gold, got)
    first, second = _reference(gold), parse(got)
    if first is None or second is None:
        return False
    try:
        return _same_expression(first, second)
    except _SYMPY_FAILS:
        return False


def _reference(gold: str) -> Any:
    """As `parse`; a reference that cannot be read is the expression of nothing, whose fault no response is.

    Raises:
        TooCostly: outside the limits.
    """
    try:
        return parse(gold)
    except Unreadable:
        return None


def same_equation(gold: str, got: str) -> bool:
    """Return whether two texts with one equals sign each say the same: the differences of their sides are proportional.

    Raises:
        TooCostly: one of them is outside the limits. Unreadable: the second holds what stands in no answer.
    """
    gold, got = _without_capitals(gold, got)
    sides = [_reference(side) for side in gold.split("=")] + [parse(side) for side in got.split("=")]
    if any(side is None for side in sides):
        return False
    try:
        return _proportional(sides[0] - sides[1], sides[2] - sides[3])
    except _SYMPY_FAILS:
        return False


def _proportional(first: Any, second: Any) -> bool:
    import sympy  # type: ignore[import-untyped]  # published without type information

    if not first.free_symbols or first.free_symbols != second.free_symbols:
        return False
    ratio = sympy.cancel(sympy.expand(first) / sympy.expand(second))
    return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero)


def _same_expression(first: Any, second: Any) -> bool:
    import sympy

    if not isinstance(first, sympy.Expr) or not isinstance(second, sympy.Expr):
        return type(first) is type(second) and bool(first == second)
    first, second = first.doit(), second.doit()
    symbols = first.free_symbols | second.free_symbols
    if any(each.name == "i" for each in symbols):
        # the parser takes variables for real numbers, except where the imaginary unit stands beside them
        plain = {each: sympy.I if each.name == "i" else sympy.Symbol(each.name) for each in symbols}
        first, second = first.subs(plain), second.subs(plain)
    endless = (sympy.oo, -sympy.oo)
    if any(side.has(sympy.zoo, sympy.nan, *endless) for side in (first, second)):
        return bool(first == second and first in endless)
    difference = first - second
    if difference == 0:
        return True
    # a point where they differ disproves equality without simplifying anything
    symbols = sorted(difference.free_symbols, key=str)
    point = {symbol: sympy.Rational(7 + 4 * index, 5 + index) for index, symbol in enumerate(symbols)}
    value = difference.subs(point).evalf(_PRECISION_DIGITS)
    if value.is_number and value.is_comparable is not None and abs(value) > sympy.Float(10) ** -25:
        return False
    return bool(sympy.expand(difference) == 0 or sympy.simplify(difference) == 0)


# ---- verifier --------------------------------------------------------------------------------------------------------


ANSWER_CHARACTERS_MAX = 1_000
SENTENCE_CHARACTERS_MAX = 2_000  # a search in more could be quadratic
MEMBERS_MAX = 20
BASE_MIN = 2
WORD_CHARACTERS_MIN = 4  # what is shorter may be a product of variables, whose case counts
_DEPTH_MAX = 4
_IN_BASE = re.compile(r"(-?)\s*(\d[0-9A-Z]{0,30})\s*_\s*\{?\s*(\d{1,2})\s*\}?")
_BY_ZERO = re.compile(r"(?:/\s*|\\frac\s*\{[^{}]*\}\s*\{\s*)-?0+(?:\.0*)?(?![\d.])")
_CURRENCY = re.compile("\\\\\\$|[\u20ac\u00a3\u00a5]")  # a bare dollar sign begins mathematics
_LATEX_FRACTION = re.compile(r"[-\u2212]?\s*\\[dt]?frac\s*\{\s*-?\d+\s*\}\s*\{\s*\d+\s*\}")
_SENTENCE_END = re.compile(r"[.;!]\s+(?=[A-Z])|\.$|!+$")  # what ends in a question is not said
# words that begin a reason, and a remark in brackets at the end; what they say is no part of the value
_REASON = re.compile(
    r"\s*(?:[,;:]|\s[-\u2013\u2014])?\s+(?:because|since|which\s+(?:is|was|we|can|follows|makes|means|gives|equals)|due\s+to"
    r"|thanks\s+to|so\s+that|as\s+(?:shown|required|desired|needed|wanted|expected|computed|stated|claimed|found))\b"
    r"(?=.)",
    re.IGNORECASE,
)
_BOLD = re.compile(r"(?<![\w)}])\*\*(?=\S)([^*]+)\*\*(?![\w(])")
_REMARK = re.compile(
    r"\s+\((?:of|out\s+of|in|for|per|i\.e\.,?|that\s+is,?|rounded|about|approximately|see|from|by|because|since|as|using"
    r"|with|step|after|cf\.?|shown|found|obtained)\s[^()$]{1,200}\)(?=\s*[.!]?$)",
    re.IGNORECASE,
)
_WEIGHING = re.compile(
    r"\b(?:or|otherwise|alternatively|but|unless|else|either|instead|maybe|perhaps|possibly|however|although|though"
    r"|(?:and|also)\s+(?:the\s+answer|it|also|maybe|\S{1,40}\s+(?:because|since)))\b|\?",
    re.IGNORECASE,
)
_HEDGING = r"\s*(?:(?:also|maybe|perhaps|possibly|rather|not|but|even|else|is|equal|to)\s+){0,3}"
_ALTERNATIVES = re.compile(
    r"\$\s*(?:,|;|/|,?\s*\(?(?:or|and|but|not)\b)" + _HEDGING + r"\$"
    r"|\$[^$.]{0,60}\b(?:else|otherwise|alternatively|if\s+not)\b[^$.]{0,20}\$"
    r"|\$\s*\(\s*\$[^$]+\$\s*(?:otherwise|perhaps|maybe|possibly)\b"
    r"|\$\s*,?\s*or\b" + _HEDGING + r"[-+]?\d|\d\s*,?\s*or\b" + _HEDGING + r"\$",
    re.IGNORECASE,
)
# where one of several numbers would have to be picked
_CHOOSING = re.compile(
    r"^\D*?\b(?:not|either|neither|between)\b|\d\s*(?:to|-|\u2013)\s*\d|\d\D*?\b(?:or|nor|but)\b\D{0,40}\d",
    re.IGNORECASE,
)
_MATHEMATICS = re.compile(r"\$([^$]+)\$")
_WORDS = re.compile(r"[A-Za-z]{3,}\s+[A-Za-z]{2,}\s+[A-Za-z]")


_Bound = tuple[Fraction | float, bool]

_NUMBER = re.compile(
    r"(?<!\d)(?<!\d[,.])(?<!\w_)(?<!\w_\{)[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,4})?(?:\s*/\s*\d+)?%?"
    r"(?![\d,.]*\d)(?!_[\w{\\])(?!\s*/\s*\d+_)",  # nor a digit of x_1, nor one that has its base below, as 12_7
    re.ASCII,
)
_BEFORE_LAST = re.compile(
    r"(?:\b(?:or|nor|not|and/or|versus|maybe|perhaps|possibly|except|at\s+least|at\s+most|(?:any\w*|every\w*|all|nothing)\s+but"
    r"|(?:be|is|are|was|equals?|becomes?|answer)\s+(?:more|less|fewer|greater|larger|smaller|bigger|higher|lower)\s+than"
    r"|\d\s+to|between\s+\S{1,20}\s+and|cannot\s+be|unlikely\s+to\s+be)|n['\u2019]t(?:\s+be)?|\d\s*[|/~]|[<>\u2264\u2265\u2260])\s*[$(]*\s*[-+]?$",
    re.IGNORECASE,
)


def grade(response: str, reference: str) -> Verdict:
    if not check_reference(reference):
        return BAD_REFERENCE
    try:
        answer = extract(response, reference)
    except CutOff:
        return NO_ANSWER
    if answer is None or not answer.strip():
        return NO_ANSWER
    if len(answer) > ANSWER_CHARACTERS_MAX:
        return TOO_COSTLY
    if HIDDEN.search(answer):
        return NO_ANSWER
    try:
        return judged(agree(reference, answer) or _agree_each(reference, answer))
    except TooCostly:
        return TOO_COSTLY
    except Unreadable:
        return NO_ANSWER


def _agree_each(gold: str, got: str) -> bool:
    """Return whether the candidates that stand side by side are one value in several forms: `$\frac12$ or $0.5$`."""
    if _ALTERNATIVES.search(got) is None or re.search(r"\d", _MATHEMATICS.sub("", got)) is not None:
        return False
    return all(agree(gold, each) for each in _MATHEMATICS.findall(got))


def check_reference(reference: str) -> bool:
    """Return whether there is something to compare with: not empty, not too long, brackets in order, nothing over
    zero."""
    text = layout.normalise(reference) if len(reference) <= ANSWER_CHARACTERS_MAX else ""
    if not text or not re.search(r"[A-Za-z0-9]", text) or _BY_ZERO.search(text):
        return False
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0


def extract(response: str, reference: str) -> str | None:
    """The answer's text: the last box; else what follows the last cue; else a short whole response or its last number.

    Raises:
        CutOff: the response ends inside its box or its thinking.
    """
    answer = outside_thinking(response)
    boxed = final_boxed(answer)
    if boxed is not None:
        return boxed
    cued = after_last_cue(answer)
    if cued is not None:
        if "!" in reference and cued.endswith("!"):
            cued += " "  # a factorial, where the reference has one
        cued = _BOLD.sub(r"\1", cued[: 2 * SENTENCE_CHARACTERS_MAX])
        sentence = " ".join(_SENTENCE_END.split(cued, maxsplit=1)[0].strip(" *").split())
        if len(sentence) > SENTENCE_CHARACTERS_MAX:
            sentence = sentence[:SENTENCE_CHARACTERS_MAX].rpartition(" ")[0] or sentence
        sentence = _without_reason(sentence)
        mathematics = _MATHEMATICS.search(sentence)
        if mathematics is not None:
            return sentence if _ALTERNATIVES.search(sentence) else mathematics.group(1)
        is_single = not _CHOOSING.search(sentence) and not _REASON.search(sentence)
        if is_single and _WORDS.search(sentence) and numeric.check_reference(reference):
            numbers = _last_numbers(sentence)
            return numbers[0] if numbers else sentence
        return sentence
    whole = answer.strip()
    is_short = len(whole) <= ANSWER_CHARACTERS_MAX and "\n" not in whole and not _WORDS.search(whole)
    if is_short and (_bare_number(reference) is None or _bare_number(whole) is not None):
        return whole
    tail = answer[-ANSWER_CHARACTERS_MAX:]
    return None if _last_is_offered(tail) or last_is_taken_back(tail) else _last_number(tail)


def _without_reason(sentence: str) -> str:
    """A sentence up to where it begins to say why: `3, since 1+2=3` -> `3`, `3 (see step 2)` -> `3`. One that weighs
    another candidate behind its reason is left as it is, and is then no single value."""
    plain = _REMARK.sub("", sentence)
    reason = _REASON.search(plain)
    if reason is None or _WEIGHING.search(plain, reason.end()):
        return plain.strip()
    return plain[: reason.start()].strip(" *")


def _bare_number(text: str) -> Fraction | None:
    """The value of a text that is a number and nothing else but layout, an assignment or a unit."""
    if len(text) > ANSWER_CHARACTERS_MAX:
        return None
    return numeric.number(layout.drop_assignment(layout.split_unit(layout.normalise(text))[0]))


def _last_number(text: str) -> str | None:
    """The last number of a text, be it a fraction in LaTeX. Of currency and other signs before it none is kept."""
    plain = text.replace("{,}", ",").replace("$", " ")
    fractions = list(_LATEX_FRACTION.finditer(plain))
    numbers = _last_numbers(plain[fractions[-1].end() :] if fractions else plain)
    if numbers:
        return numbers[-1]
    return fractions[-1][0] if fractions else None


def _last_is_offered(text: str) -> bool:
    """Return whether the last number of a text was offered beside another, or refused: "3 or 4", "at least 5"."""
    plain = text.translate(numeric.SIGN)
    starts = [each.start() for each in _NUMBER.finditer(plain) if any(map(str.isdigit, each[0]))]
    return bool(starts) and _BEFORE_LAST.search(plain, max(0, starts[-1] - 80), starts[-1]) is not None


def _last_numbers(text: str) -> list[str]:
    """The numbers written in the last part of a text, in order."""
    plain = text[-numeric.TAIL_CHARACTERS :].translate(numeric.SIGN)
    return [number for number in _NUMBER.findall(plain) if any(character.isdigit() for character in number)]


def agree(gold: str, got: str) -> bool:
    """Return whether two answers denote the same object.

    Raises:
        TooCostly: they are not the same text, and comparing them could take too long.
        Unreadable: nor is the second one that can be compared.
    """
    currencies = [set(_CURRENCY.findall(text)) for text in (gold, got)]
    if all(currencies) and currencies[0] != currencies[1]:
        return False
    return _agree(layout.normalise(gold), layout.normalise(got), _DEPTH_MAX)


def _agree(gold: str, got: str, depth: int) -> bool:
    if not gold or not got or depth == 0:
        return False
    if layout.tight(gold) == layout.tight(got):
        return True
    if gold.lower() in {"true", "false", "yes", "no"}:
        return layout.tight(got).lower() == gold.lower()
    words = layout.tight(gold)
    if words.isalpha() and len(words) >= WORD_CHARACTERS_MIN and layout.tight(got).lower() == words.lower():
        return True
    (gold, gold_unit), (got, got_unit) = layout.split_unit(gold), layout.split_unit(got)
    if gold_unit and got_unit and gold_unit != got_unit:
        return False
    if gold.count("=") == got.count("=") == 1 and same_equation(gold, got):
        return True
    gold, got = layout.drop_assignment(gold), layout.drop_assignment(got)
    if "\\emptyset" in {gold, got}:  # and no set that holds it
        return gold == got
    gold_based, got_based = _in_base(gold), _in_base(got)
    if gold_based is not None and got_based is not None:
        return gold_based == got_based
    gold_number, got_number = numeric.number(gold), numeric.number(got)
    if gold_number is not None and got_number is not None:
        is_percent = got.endswith("%") and numeric.takes_percent(gold, gold_number)
        as_percentage = is_percent and gold_number == got_number * 100
        return gold_number == got_number or as_percentage
    structured = _agree_structures(gold, got, depth)
    if structured is not None:
        return structured
    if "=" in got and "=" not in gold:
        return _agree_chain(gold, got, depth)
    return "=" not in gold and "=" not in got and same(gold, got)


def _agree_chain(gold: str, got: str, depth: int) -> bool:
    r"""`S = 2 \cdot 3 = 6` or `6 = S`: every part is the reference, or at either end the name of a variable."""
    parts = [part.strip() for part in got.split("=")]
    values = [part for part in parts if re.fullmatch(r"[A-Za-z](?:_\{?\w+\}?)?", part) is None]
    if len(parts) > MEMBERS_MAX or len(parts) - len(values) > 1:
        return False
    return bool(values) and all(_agree(gold, value, depth - 1) for value in values)


def _agree_structures(gold: str, got: str, depth: int) -> bool | None:
    """The verdict where one side is a matrix, interval, tuple, union or list; None where neither is."""
    gold_matrix, got_matrix = layout.matrix(gold), layout.matrix(got)
    if gold_matrix is not None or got_matrix is not None:
        return (
            gold_matrix is not None
            and got_matrix is not None
            and [len(row) for row in gold_matrix] == [len(row) for row in got_matrix]
            and all(
                _agree(first, second, depth - 1)
                for gold_row, got_row in zip(gold_matrix, got_matrix, strict=True)
                for first, second in zip(gold_row, got_row, strict=True)
            )
        )
    gold, got = layout.as_interval(gold), layout.as_interval(got)
    gold_parts, got_parts = layout.split_top_level(gold, "\\cup"), layout.split_top_level(got, "\\cup")
    if len(gold_parts) > 1 or len(got_parts) > 1:
        joined = _joined(gold_parts), _joined(got_parts)
        if joined[0] is not None and joined[1] is not None:
            return joined[0] == joined[1]
        return _agree_unordered(gold_parts, got_parts, depth)
    gold_pair, got_pair = _ordered(gold), _ordered(got)
    if gold_pair is not None or got_pair is not None:
        return (
            gold_pair is not None
            and got_pair is not None
            and gold_pair[0] == got_pair[0]
            and len(gold_pair[1]) == len(got_pair[1])
            and all(_agree(first, second, depth - 1) for first, second in zip(gold_pair[1], got_pair[1], strict=True))
        )
    gold_named, got_named = _named(gold), _named(got)
    if gold_named is not None and got_named is not None and set(gold_named) == set(got_named):
        return all(_agree(value, got_named[name], depth - 1) for name, value in gold_named.items())
    if _is_set(gold) and _is_set(got):
        return _agree_sets(_members(gold), _members(got), depth)
    gold_members, got_members = _members(gold), _members(got)
    if len(gold_members) == len(got_members) == 1:
        return (
            None
            if (gold_members[0], got_members[0]) == (gold, got)
            else _agree(gold_members[0], got_members[0], depth - 1)
        )
    return _agree_unordered(gold_members, got_members, depth)


def _joined(parts: list[str]) -> list[tuple[_Bound, _Bound]] | None:
    """Intervals between numbers, as the fewest that make the same set; None where a part is something else."""
    intervals: list[tuple[_Bound, _Bound]] = []
    for part in parts:
        interval = layout.brackets(layout.as_interval(part))
        ends = layout.split_top_level(interval[1], ",") if interval is not None else []
        if interval is None or len(ends) != 2 or interval[0] not in "([":
            return None
        low, high = _end(ends[0]), _end(ends[1])
        if low is None or high is None:
            return None
        # a closed end lies before its number on the left and behind it on the right
        intervals.append(((low, interval[0] == "("), (high, interval[2] == "]")))
    whole: list[tuple[_Bound, _Bound]] = []
    for low_end, high_end in sorted(each for each in intervals if each[0] < each[1]):
        if whole and low_end <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(whole[-1][1], high_end))
        else:
            whole.append((low_end, high_end))
    return whole


def _end(text: str) -> Fraction | float | None:
    plain = text.replace(" ", "").removeprefix("+")
    return {"\\infty": inf, "-\\infty": -inf}.get(plain) or numeric.number(text)


def _agree_unordered(gold: list[str], got: list[str], depth: int) -> bool:
    """Return whether the members can be paired off. Equality is transitive, so the first partner found will do."""
    if len(gold) != len(got) or len(gold) > MEMBERS_MAX:
        return False
    rest = list(got)
    for member in gold:
        partner = next((other for other in rest if _agree(member, other, depth - 1)), None)
        if partner is None:
            return False
        rest.remove(partner)
    return True


def _agree_sets(gold: list[str], got: list[str], depth: int) -> bool:
    """Return whether each member of either set is in the other; how often one is written does not matter."""
    if max(len(gold), len(got)) > MEMBERS_MAX:
        return False
    return all(any(_agree(member, other, depth - 1) for other in got) for member in gold) and all(
        any(_agree(member, other, depth - 1) for member in gold) for other in got
    )


def _is_set(text: str) -> bool:
    inside = layout.brackets(text)
    return inside is not None and inside[0] == "\\{"


def _ordered(text: str) -> tuple[str, list[str]] | None:
    """Tuples and intervals: their two brackets and their members. `(x+2)` alone is no tuple."""
    inside = layout.brackets(text)
    if inside is None or inside[0] == "\\{":
        return None
    members = layout.split_top_level(inside[1], ",")
    return (inside[0] + inside[2], members) if len(members) > 1 else None


def _named(text: str) -> dict[str, str] | None:
    """`x = 2, y = 3` by variable; None where a part has none, or two have the same."""
    parts = layout.split_top_level(text, ",")
    named = {layout.assigned_name(part): layout.drop_assignment(part) for part in parts}
    return named if len(named) == len(parts) > 1 and "" not in named else None


def _members(text: str) -> list[str]:
    r"""Members of a set or of a list of solutions; one `\pm` stands for two. A number with thousands commas is one."""
    inside = layout.brackets(text)
    if inside is not None and inside[0] == "\\{":
        text = inside[1]
    members = [text] if layout.is_thousands(text) else layout.split_top_level(text, ",")
    members = [layout.drop_assignment(member) for member in members if member]
    if inside is not None and inside[0] == "\\{":
        members = list({layout.tight(member): member for member in members}.values())  # a set has a member once
    signs = [("+", "-") if member.count("\\pm") == 1 else ("",) for member in members]
    return [
        member.replace("\\pm", sign).strip().removeprefix("+").strip() if sign else member
        for member, choices in zip(members, signs, strict=True)
        for (sign,) in product(choices)
    ]


def _in_base(text: str) -> tuple[int, int] | None:
    """(value, base) of digits with their base below, which no plain number equals: the base is part of the answer."""
    match = _IN_BASE.fullmatch(text.strip())
    if match is None or int(match[3]) < BASE_MIN:
        return None
    try:
        return int(match[1] + match[2], int(match[3])), int(match[3])
    except ValueError:  # a digit or a base that there is not
        return None
