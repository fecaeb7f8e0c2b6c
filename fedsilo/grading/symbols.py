r"""Whether two expressions denote the same object, exactly, through math-verify's LaTeX parser and sympy.

math-verify's own comparison rounds to floats, so only its parser is used. Before anything is parsed the text is
bounded: its length, the product of all its written exponents, and no factorials, sums, products, integrals, limits
or binomials. What is not bounded here (a simplification that takes long) ends at the grading process's deadline.
"""

from __future__ import annotations

import math
import re
from typing import Any

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


def _small_factorial(found: re.Match[str]) -> str:
    return f"({math.factorial(int(found[1]))})" if int(found[1]) <= FACTORIAL_MAX else found[0]


def _small_binomial(found: re.Match[str]) -> str:
    above, below = int(found[1]), int(found[2])
    return f"({math.comb(above, below)})" if above <= BINOMIAL_MAX else found[0]


def require_cheap(latex: str) -> None:
    """Raises TooCostly, Unreadable."""
    if len(latex) > CHARACTERS_MAX or _COSTLY.search(latex):
        raise TooCostly
    if _ALLOWED.fullmatch(latex) is None or _has_misplaced_subscript(latex):
        raise Unreadable
    if any(_COMMANDS.fullmatch(name) is None for name in _COMMAND.findall(latex)):
        raise Unreadable
    if len(_GROWING.findall(latex)) > GROWING_MAX or _GROWING_WITHIN.search(latex):
        raise TooCostly
    product = 1
    found = 0
    for match in _EXPONENT.finditer(latex):
        found += 1
        product *= max(1, abs(int((match.group(1) or match.group(2))[:9])))
    if product > EXPONENTS_PRODUCT_MAX or _depth(latex) > NESTING_MAX:
        raise TooCostly
    # an exponent that is not a written number may be anything, but not with another one above or below it
    if re.search(r"\^\s*\{[^{}]*\}\s*\^", latex):
        raise TooCostly
    if latex.count("^") - found > SYMBOLIC_EXPONENTS_MAX:
        raise TooCostly
    if latex.count("^") > found and re.search(r"\^\s*\{[^{}]*\^", latex):
        raise TooCostly
    if latex.count("^") > found and re.search(r"\^\s*\{[^{}]*\d{3,}", latex):
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
    found = parse_latex(
        f"\\boxed{{{latex}}}", extraction_config=[config], fallback_mode="no_fallback", parsing_timeout=None
    )
    if not found or not hasattr(found[0], "free_symbols"):
        return None
    return found[0]


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
    """Whether the two texts denote the same expression. What cannot be parsed, or is not finite, equals nothing.

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
    """Whether two texts with one equals sign each say the same: the differences of their sides are proportional.

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
