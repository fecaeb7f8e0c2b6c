r"""Whether two expressions denote the same object, exactly, through math-verify's LaTeX parser and sympy.

math-verify's own comparison rounds to floats, so only its parser is used. Before anything is parsed the text is
bounded: its length, the product of all its written exponents, and no factorials, sums, products, integrals, limits
or binomials. What is not bounded here (a simplification that takes long) ends at the grading process's deadline.
"""

from __future__ import annotations

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
_EXPONENT = re.compile(r"\^\s*(?:\{\s*\(?\s*(-?\d+)(?:\s*/\s*\d+)?\s*\)?\s*\}|(\d+))")
_SYMPY_FAILS = (ValueError, TypeError, ArithmeticError, AttributeError, LookupError, RuntimeError, AssertionError)


class TooCostly(Exception):  # a verdict, not an error
    """The text is outside the limits and was not parsed."""


def to_latex(text: str) -> str:
    r"""Plain notation made LaTeX: `2*x**2` -> `2 \cdot x^{2}`, `sqrt(3)` -> `\sqrt{3}`, 0.5 -> \frac{5}{10}."""
    plain = text.replace("**", "^")
    plain = re.sub(r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", plain)
    plain = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", plain)
    plain = re.sub(r"\^\s*(-?\d+)", r"^{\1}", plain)
    plain = re.sub(r"\^\s*\(([^()]*)\)", r"^{(\1)}", plain)
    plain = plain.replace("*", " \\cdot ")
    plain = re.sub(r"(?<=[\d])%", r" \\cdot \\frac{1}{100}", plain)
    return re.sub(
        r"(?<![\d.])(\d*)\.(\d+)", lambda found: f"\\frac{{{found[1] or 0}{found[2]}}}{{1{'0' * len(found[2])}}}", plain
    )


def require_cheap(latex: str) -> None:
    """Raises TooCostly."""
    if len(latex) > CHARACTERS_MAX or _COSTLY.search(latex) or _ALLOWED.fullmatch(latex) is None or "__" in latex:
        raise TooCostly
    product = 1
    found = 0
    for match in _EXPONENT.finditer(latex):
        found += 1
        product *= max(1, abs(int((match.group(1) or match.group(2))[:9])))
    if product > EXPONENTS_PRODUCT_MAX or _depth(latex) > NESTING_MAX:
        raise TooCostly
    # an exponent that is not a written number may be anything, but not with another one above or below it
    if latex.count("^") - found > 1 or (latex.count("^") > found and re.search(r"\^\s*\{[^{}]*\^", latex)):
        raise TooCostly
    if latex.count("^") > found and re.search(r"\^\s*\{[^{}]*\d{3,}", latex):
        raise TooCostly
    if any(len(digits) > DIGITS_MAX for digits in re.findall(r"\d+", latex)):
        raise TooCostly


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest


def parse(text: str) -> Any:
    """A sympy expression, or None when the text is none.

    Raises:
        TooCostly: outside the limits.
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


def same(gold: str, got: str) -> bool:
    """Whether the two texts denote the same expression. What cannot be parsed, or is not finite, equals nothing.

    Raises:
        TooCostly: one of them is outside the limits.
    """
    first, second = parse(gold), parse(got)
    if first is None or second is None:
        return False
    try:
        return _same_expression(first, second)
    except _SYMPY_FAILS:
        return False


def _same_expression(first: Any, second: Any) -> bool:
    import sympy  # type: ignore[import-untyped]  # published without type information

    if not isinstance(first, sympy.Expr) or not isinstance(second, sympy.Expr):
        return type(first) is type(second) and bool(first == second)
    imaginary = sympy.Symbol("i")
    first, second = (side.doit().subs(imaginary, sympy.I) for side in (first, second))
    if any(side.has(sympy.zoo, sympy.nan, sympy.oo, -sympy.oo) for side in (first, second)):
        return bool(first == second and first in (sympy.oo, -sympy.oo))
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
