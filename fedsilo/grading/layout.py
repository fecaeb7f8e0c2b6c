r"""The layout of a mathematical answer taken away: what remains is compared (policies 3 and 4 of the examples).

Text only, every step linear in a text of at most a few thousand characters: no expression is built here.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from fedsilo.grading.extraction import CutOff, closing_brace

_CHARACTERS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u03c0": "\\pi ",
        "\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u222a": "\\cup ", "\u00b1": "\\pm ",
        "\u00b0": "", "\u20ac": "", "\u00a3": "", "\u2032": "'", "\u2010": "-", "\u2011": "-", "\u2044": "/",
        "\u00f7": "/", "\u2217": "*", "\u22c5": "\\cdot ", "\u2205": "\\emptyset ", "\u2208": "\\in ",
        "\u211d": "\\mathbb{R}", "\u0393": "\\Gamma ", "\u0394": "\\Delta ", "\u0398": "\\Theta ",
        "\u039b": "\\Lambda ", "\u039e": "\\Xi ", "\u03a0": "\\Pi ", "\u03a3": "\\Sigma ", "\u03a6": "\\Phi ",
        "\u03a8": "\\Psi ", "\u03a9": "\\Omega ",
        "\u03b1": "\\alpha ", "\u03b2": "\\beta ", "\u03b3": "\\gamma ", "\u03b4": "\\delta ", "\u03b5": "\\epsilon ",
        "\u03b6": "\\zeta ", "\u03b7": "\\eta ", "\u03b8": "\\theta ", "\u03b9": "\\iota ", "\u03ba": "\\kappa ",
        "\u03bb": "\\lambda ", "\u03bc": "\\mu ", "\u03bd": "\\nu ", "\u03be": "\\xi ", "\u03c1": "\\rho ",
        "\u03c3": "\\sigma ",
        "\u03c4": "\\tau ", "\u03c5": "\\upsilon ", "\u03c6": "\\phi ", "\u03c7": "\\chi ", "\u03c8": "\\psi ",
        "\u03c9": "\\omega ",
    }
)  # fmt: skip
_RAISED = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f"
_RAISED_RUN = re.compile(f"[{_RAISED}]+")
_LOWERED_RUN = re.compile("[\u2080-\u2089]+")
_FRACTION_SIGN = re.compile("(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])")
_ROOT_SIGN = re.compile(r"\u221a\s*(?:\(([^()]*)\)|(\d+|[a-z]))")
# the scale of a temperature is a unit, where the letter alone would be a variable
_TEMPERATURE = re.compile(
    r"(?:\u00b0|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree)\s*(?:([CF])(?![a-zA-Z])|\\(?:text|mathrm)\s*\{\s*([CF])\s*\})"
)
_SPACING = re.compile(
    r"(?<!\\)\\[!,;:> ]|(?<!\\)\\(?:quad|qquad|displaystyle|left(?![a-z])|right(?![a-z])|bigl?|bigr?|Bigl?|Bigr?|limits"
    r"|mathstrut|textstyle|bf|bfseries|boldmath|tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![a-zA-Z])|~"
)
_COLOUR = r"(?:\[[A-Za-z]{1,8}\]\s*)?\{(?!\s*(?:white|transparent))[A-Za-z0-9!., ]{1,40}\}"  # what can be seen
_WRAPPER = re.compile(
    rf"\\(?:(?:textcolor|colorbox)\s*{_COLOUR}|underline|uline|emph|mathbf|boldsymbol|bm|mathit|mathsf|mathtt)\s*\{{"
)
_WRAPPERS_MAX, _BRACES_MAX = 16, 8
# what is one sign, or digits, reads the same without a wrapper wherever it stands
_ONE_SIGN = re.compile(r"[A-Za-z0-9.]+|\\[A-Za-z]+|\\(?:frac\s*\{[^{}]*\}|sqrt)\s*\{[^{}]*\}")
_BEFORE_WHOLE, _AFTER_WHOLE = re.compile(r"(?:^|[=,(\[{])\s*$"), re.compile(r"\s*(?:$|[=,)\]}]|\\[}])")
_OUTWARD = re.compile(r"\s*([\[\]])([^()\[\],]+),([^()\[\],]+)([\[\]])\s*")
_SAME = (
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(rf"\\color\s*{_COLOUR}"), ""),
    (re.compile(r"\\log\s*_\s*(?:e(?![a-zA-Z])|\{\s*e\s*\})"), r"\\ln "),
    (re.compile(r"\\lbrace(?![a-z])\s*"), r"\\{"),
    (re.compile(r"\s*\\rbrace(?![a-z])"), r"\\}"),
    (re.compile(r"(?<=[\d.])\\dot\s*\{?(\d)\}?(\d{0,28})\\dot\s*\{?(\d)\}?"), r"\\overline{\1\2\3}"),
    (re.compile(r"(?<=[\d.])\\dot\s*\{?(\d)\}?$"), r"\\overline{\1}"),
    (re.compile(r"\\(?:leq|leqslant)(?![a-z])"), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant)(?![a-z])"), r"\\ge "),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"\\lt(?![a-z])"), "<"),
    (re.compile(r"\\gt(?![a-z])"), ">"),
    (re.compile(r"\\l?dots(?![a-z])"), "..."),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\s*\\text\s*\{\s*(?:percent|per\s*cent|\\?%)\s*\}|(?<=[\d}])\s+per\s?cent(?![a-z])"), "%"),
    (re.compile(r"\\frac\s*\{\s*\\text\{ ?([a-z]+) ?\}\s*\}\s*\{\s*\\text\{ ?([a-z]+) ?\}\s*\}"), r"\\text{ \1/\2}"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"(?<=[\d}])\s+%"), "%"),
    (re.compile(r"\\\$|\$|\\[()]|(?<!\\)\\[\[\]](?![0-9])"), ""),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])"), ""),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt\s*(\d)"), r"\\sqrt{\1}"),
    (re.compile(r"\\mathbb\s*\{\s*R\s*\}|\\(?:R|Reals)(?![A-Za-z])"), r"(-\\infty,\\infty)"),
    (re.compile(r"\\(?:mathbb|mathbf|mathrm|mathit|boldsymbol|bm)\s*\{([A-Za-z0-9]+)\}"), r"\1"),
    (re.compile(r"\{[bB]matrix\}|\{smallmatrix\}|\{array\}\{[a-z|]*\}"), "{pmatrix}"),
    (re.compile(r"\\varnothing(?![a-z])|^\s*\\\{\s*\\\}\s*$"), r"\\emptyset "),
    (re.compile(r"(?<!\\);"), ", "),
)
# roots that are written one behind another with nothing but space: `x_1 = 0 \\quad x_2 = 1`
_ROOTS_APART = re.compile(r"(?<=[\d})])\s*(?:\\\\|\s)\s*(?=[A-Za-z](?:_\{?\w{1,3}\}?)?\s*=)")
_SEPARATING_WORD = re.compile(
    r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
)
_OR = re.compile(
    r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*,?\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\(?:lor|vee)(?![a-z])"
)
_RELATION = re.compile(r"<|>|\\[lg]e(?![a-z])")
_WHOLE_TEXT = re.compile(r"\\(?:text|mathrm|textrm|textbf|textit|mbox|mathbf)\s*\{([^{}]*)\}")
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|textbf|textit|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"^(?P<value>-?[\d.,]*[\d.]%?|-?\\frac\{\d+\}\{\d+\}|-?\d+\s*/\s*\d+|-?[\d.]+\s*\\times\s*10\^\{?-?\d+\}?)\s*"
    r"(?P<unit>(?:\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}"
    r"|(?<=[\s\d])(?:cm|mm|km|kg|mg|ml|ft|hr|hrs|min|sec|mph|kmh|mi|lbs?|oz|[kMm]J|[kM]W|[kMG]?Hz|k?Pa|mV|kV|mA|mL|dL"
    r"|[kMG]?eV|mol|k?cal|kN|[kMG]B|rpm)(?![A-Za-z])(?:\s*/\s*[A-Za-z]+)?|(?<=[\s\d])(?:(?:[kM]|\\(?:text|mathrm)\s*\{\s*[kM]\s*\})\s?)?\\Omega"
    r"|(?<=\s)(?:[mgJNWVL]|in)(?:/s)?(?![A-Za-z])|(?<=\s)(?!pi|sqrt|sin|cos|tan|log|and)[A-Za-z]{3,}[A-Za-z ./]*)"
    r"(?:\s*\^\s*\{?-?\d\}?)?)$"
)
# a number, root, constant or variable with a unit in a text wrapper: what stands before must be an expression's end
_WRAPPED_UNIT = re.compile(
    r"^(?P<value>.*[\w})\]])\s*\\(?:text|mathrm|textrm|mbox)\s*\{(?P<unit>[^{}]*)\}(?P<power>\s*\^\s*\{?-?\d\}?)?$"
)
# the base of a number's digits, in words or as a subscript: no unit
_BASE = re.compile(
    r"[\s({]*(?:_|(?:in\s+)?base[\s-]*(?:\d|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|sixteen))",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    r"^\s*(?:[A-Za-z](?:_\{[\w,]{1,9}\}|_\{?\w+\}?)?'?\s*(?:\(\s*[a-z](?:\s*,\s*[a-z])*\s*\))?|\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)"
    r"|\\[a-z]+(?<!\\frac)(?<!\\sqrt)|m?\s*\\angle\s*\{?[A-Z]{1,3}\}?"
    r"|\|?[A-Z]{2,3}\|?|\\(?:overline|vec|text|mathrm)\s*\{[A-Za-z ]+\})\s*(?:=|\\in(?![a-z])|:=)\s*(?P<value>[^=]+)$"
)
_BOUND = re.compile(r"\s*([a-zA-Z])\s*(<|>|\\[lg]e(?![a-z]))\s*([^<>,=]+)")
_LEAD = re.compile(r"^\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*(?:is|are|:|=)\s*\}(?=.)")
_NAME = re.compile(r"\s*([A-Za-z](?:_\{?\w+\}?)?)\s*=(?!=)")
_NAMED_POINT = re.compile(r"[A-Z]\s*(\([^()]*,[^()]*\))")
_SET_BUILDER = re.compile(r"\\\{\s*([a-zA-Z])\s*(?:\\in\s*\(-\\infty,\\infty\)\s*)?(?:\\mid|\\vert|\||:)(.+)\\\}")
_DIGIT_GAP = re.compile(r"(?<=\d) (?=\d{3}(?![\d/]))")
_SPELLINGS = {
    "m": "meter meters metre metres", "cm": "centimeter centimeters centimetre centimetres",
    "mm": "millimeter millimeters millimetre millimetres", "km": "kilometer kilometers kilometre kilometres kms",
    "nm": "nanometer nanometers nanometre nanometres", "in": "inch inches", "ft": "foot feet", "yd": "yard yards yds",
    "mi": "mile miles", "s": "sec secs second seconds", "ms": "millisecond milliseconds", "min": "mins minute minutes",
    "h": "hr hrs hour hours", "d": "day days", "yr": "yrs year years", "g": "gram grams gramme grammes gm gms",
    "kg": "kilogram kilograms kilogramme kilogrammes kgs kilo kilos", "mg": "milligram milligrams",
    "t": "ton tons tonne tonnes",
    "lb": "lbs pound pounds", "oz": "ounce ounces", "l": "liter liters litre litres",
    "ml": "milliliter milliliters millilitre millilitres", "j": "joule joules", "kj": "kilojoule kilojoules",
    "n": "newton newtons", "w": "watt watts", "kw": "kilowatt kilowatts", "v": "volt volts",
    "a": "amp amps ampere amperes",
    "ohm": "ohms \u03c9", "hz": "hertz", "pa": "pascal pascals", "kpa": "kilopascal kilopascals",
    "mol": "mole moles mols",
    "k": "kelvin kelvins", "cal": "calorie calories", "kcal": "kilocalorie kilocalories", "rad": "radian radians",
    "deg": "degree degrees", "dollar": "dollars usd", "cent": "cents", "mi/h": "mph", "km/h": "kmh kph kmph",
    "c": "celsius centigrade", "f": "fahrenheit", "unit": "units", "person": "people persons",
}  # fmt: skip
UNIT_NAMES = {spelling: unit for unit, names in _SPELLINGS.items() for spelling in [unit, *names.split()]}
_POWER_BEFORE = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_POWER_BEHIND = {"squared": "^2", "cubed": "^3"}
_NO_SOLUTION = re.compile(
    r"\s*(?:there\s+(?:is|are|exists?)\s+)?(?:no|zero)\s+(?:(?:real|integer|integral|rational|complex|positive|such|possible"
    r"|valid|natural)\s+)*(?:solutions?|roots?|values?|numbers?|integers?|answers?|x)(?:\s+exists?)?\s*[.!]?\s*"
    r"|\s*(?:the\s+)?(?:empty|null)\s+set\s*[.!]?\s*|\s*\\\{\s*(?:\\,)?\s*\\\}\s*|\s*\\(?:emptyset|varnothing|O)\s*",
    re.IGNORECASE,
)
_POINTS = {"\u066b": ".", "\u066c": ","}
_TEX_THOUSANDS = re.compile(
    r"(?<=\d)(?<!^0)(?<![^\d]0)(?:,\\!|\\!,|\{,(?:\\!)?\}(?:\\!)?|\\(?:text|mathord|mathpunct)\s*\{,\}|\\!|\\thinspace\s?)"
    r"(?=\d{3}(?!\d))"
)
_DECIMAL_COMMA = re.compile(r"(?<=\d)(?:\{,\}|\\(?:text|mathord)\s*\{,\})(?=\d)")
_SCALES = {
    "dozen": 12, "hundred": 10**2, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7,
    "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
_SCALES_MAX = 3
_SCALE = re.compile(
    r"(?<![\w.,/^_{])(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d{1,12})?|\d{1,18}(?:\.\d{1,12})?)\s*(?:\\[,;: ]|~|-)?\s*"
    r"(?P<wrapper>\\(?:text|mathrm|textrm|mbox)\s*\{(?:\\[,;: ]|~)?)?\s*(?P<scale>"
    + "|".join(_SCALES)
    + r")s?(?P<rest>\}|(?![A-Za-z]))",
    re.IGNORECASE,
)
_SCALE_LETTERS = {"k": "thousand", "m": "million", "mn": "million", "b": "billion", "bn": "billion"}
_CURRENCY_SCALE = re.compile(r"((?:\\?\$|[\u20ac\u00a3\u00a5])\s*\d[\d,]*(?:\.\d+)?)\s?(k|K|M|B|bn|mn)(?![A-Za-z])")
# words that make another number of the one before them, choose or deny: no unit
SMALL_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
SMALL_NUMBERS += ["twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
CHANGING = re.compile(
    # counts ("each one" changes nothing), parts and multiples; "quarters" may be coins, "half-hours" are a unit
    rf"\b(?:(?:{'|'.join(word for word in SMALL_NUMBERS + TENS if word != 'one')}"
    r"|(?:hundred|thousand|\w*illion)(?:s|ths?)?|dozen\w*|hal(?:f|fs|ves|ved)|thirds|fifths|eighths|ninths|twelfths|(?:four|six|seven|ten|eleven|\w+teen|\w+tie)ths"
    r"|(?:doubl|tripl|\w{3,}upl)(?:e[sd]?|y)|twice|thrice|score|gross|nines)(?!-[a-z])"
    r"|(?:grand|mega|giga|tera|nano|micro|milli)\W*$|ppm|ppb|per\s?mil(?:le?)?|basis\s+points"
    # operations
    r"|plus|minus|multiplied|divided|factorial|root|square\s+roots|sqrt|raised|mod|modulo|choose|octal|hexadecimal|sin|cos"
    r"|reciprocal|complement|inver(?:se|ted)|negated|reversed"
    r"|(?:powers?|base|binary|log|tan|exp|recurring|repeat(?:ing|ed))(?!\s+[a-z]{3,}s\b)"  # "power plants" are things
    r"|times(?!\s*$|\s+(?:as|a|an|per|each|every|more|longer|in|during|total|\w{3,}er)\b)"
    # choices and denials
    r"|least|most|or|nor|either|neither|otherwise|alternatively|maybe|perhaps|possibly|probably|versus|vs|but|without"
    r"|unless|except|between|not|cannot|never|no(?!-)|nobody|none|nothing|and\s+(?:an?|up|above|over|more|below|under|counting)"
    r"|(?:is|was)\s+(?:wrong|incorrect|false))\b|n['\u2019]t\b|n/a|^\W*(?:wrong|incorrect|false|negative)\W*$"
    # right behind the number
    r"|^[\s,-]*(?:(?:more|less|fewer|greater)\s+than|(?:third|quarter|fourth|fifth)(?!\s+grade)|squared|cubed|and|to|ish|an?$|under|over|above"
    r"|below|beyond)\b",
    re.IGNORECASE,
)
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?%?")


def plain_digits(text: str) -> str:
    r"""Digits of every script as ASCII ones, thousands set apart in TeX joined, a decimal comma `2{,}5` as a point."""
    plain = text
    if not text.isascii():
        plain = "".join(
            character
            if character.isascii()
            else _POINTS.get(character) or str(unicodedata.decimal(character, character))
            for character in text
        )
    plain = _TEX_THOUSANDS.sub("", plain)
    return _DECIMAL_COMMA.sub(".", plain)


def scaled(text: str) -> str:
    """`5 million` as 5000000, in digits; other text unchanged."""
    # one space for many: a search for words behind a number would try each of them
    plain = re.sub(r"\s{2,}", lambda run: "\n" if "\n" in run[0] else " ", text)
    plain = _CURRENCY_SCALE.sub(lambda found: f"{found[1]} {_SCALE_LETTERS[found[2].lower()]}", plain)
    for _ in range(_SCALES_MAX):
        changed = _SCALE.sub(_multiplied, plain)
        if changed == plain:
            break
        plain = changed
    return plain


def _multiplied(match: re.Match[str]) -> str:
    value = Fraction(match["number"].replace(",", "")) * _SCALES[match["scale"].lower()]
    written = str(value)  # a whole number, or a/b
    rest = match["rest"]
    if match["wrapper"] is None:
        return written + rest
    return f"{written}{match['wrapper']}{rest}" if rest != "}" else written


def normalise(text: str) -> str:
    """One layout for all: compatibility forms, spacing commands, synonyms of commands, currency and degree signs."""
    plain = scaled(plain_digits(text)).replace("\u2103", "\u00b0C").replace("\u2109", "\u00b0F")
    plain = _TEMPERATURE.sub(lambda scale: f"\\text{{ {scale[1] or scale[2]}}}", plain)
    plain = _FRACTION_SIGN.sub(" ", plain)
    plain = _RAISED_RUN.sub(lambda run: f"^{{{unicodedata.normalize('NFKC', run[0])}}}".replace("\u2212", "-"), plain)
    plain = _LOWERED_RUN.sub(lambda run: f"_{{{unicodedata.normalize('NFKC', run[0])}}}", plain)
    plain = _ROOT_SIGN.sub(lambda root: f"\\sqrt{{{root[1] or root[2]}}}", plain)
    plain = unicodedata.normalize("NFKC", plain.translate(_CHARACTERS)).translate(_CHARACTERS)
    plain = _open_wrappers(" ".join(_SPACING.sub(" ", plain).split()))
    for pattern, same in _SAME:
        plain = pattern.sub(same, plain)
    whole = _WHOLE_TEXT.fullmatch(plain.strip(" ."))
    if whole is not None:
        plain = whole[1]
    if _NO_SOLUTION.fullmatch(plain):
        return "\\emptyset"
    plain = _ROOTS_APART.sub(", ", plain)
    plain = _LEAD.sub("", plain.strip())
    alternatives = _OR.split(plain)
    if len(alternatives) > 1 and all(_RELATION.search(each) for each in alternatives):
        plain = "\\cup ".join(alternatives)
    plain = _SEPARATING_WORD.sub(",", plain)
    # a full stop ends a sentence, but begins a decimal
    plain = _DIGIT_GAP.sub("", " ".join(plain.split()).rstrip(" .,").lstrip(" ,"))
    for _ in range(_BRACES_MAX):
        if not plain.startswith("{") or _closing_brace(plain, 1) != len(plain) - 1:
            break
        plain = plain[1:-1].strip()
    return plain


def _open_wrappers(text: str) -> str:
    """Without colours, lines and fonts around what reads the same without them: a sign, or all between two commas."""
    start = 0
    for _ in range(_WRAPPERS_MAX):
        wrapper = _WRAPPER.search(text, start)
        end = -1 if wrapper is None else _closing_brace(text, wrapper.end())
        if wrapper is None or end < 0:
            break
        before, inside, after = text[: wrapper.start()], text[wrapper.end() : end], text[end + 1 :]
        is_whole = _BEFORE_WHOLE.search(before) is not None and _AFTER_WHOLE.match(after) is not None
        if is_whole or _ONE_SIGN.fullmatch(inside) is not None:
            text = f"{before}{inside}{' ' if inside.startswith(chr(92)) else ''}{after}"
        else:
            start = wrapper.end()
    return text


def _closing_brace(text: str, position: int) -> int:
    """Return where the brace opened just before `position` is closed, or -1; escaped braces do not count."""
    try:
        return closing_brace(text, position)
    except CutOff:
        return -1


def tight(text: str) -> str:
    """Return the text for comparison as text: no white space, no needless braces around one character, text wrappers
    opened."""
    plain = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _TEXT.sub(r"\1", text))
    return re.sub(r"\{([A-Za-z0-9])\}", r"\1", plain)


def split_unit(text: str) -> tuple[str, str]:
    r"""A bare number and the unit behind it, or the whole text and nothing: `8\text{ apples}` -> ("8", "apple")."""
    match = _UNIT.match(text)
    wrapped = _WRAPPED_UNIT.match(text) if match is None else None
    unit = match or wrapped
    if unit is None:
        return text, ""
    unit_text = _TEXT.sub(r"\1", unit["unit"])
    if _BASE.match(unit_text) or CHANGING.search(unit_text):
        return text, ""
    if match is None:
        if not _balanced(unit["value"]) or not re.search(r"[A-Za-z]", unit_text):
            return text, ""
        unit_text += unit["power"] or ""
    return unit["value"].strip(), _same_unit(unit_text)


def _same_unit(text: str) -> str:
    """One spelling of a unit: `square centimeters` and `cm^2`, `meters per second` and `m/s`, `hours` and `hour`."""
    plain = re.sub(r"\\(?:Omega|ohm)(?![a-z])", " ohm ", text)
    plain = re.sub(r"\\(?:mu|micro)(?![a-z])\s*", "u", plain).replace("\\cdot", " ").replace("\\", " ").lower()
    plain = re.sub(r"\bper\b", "/", plain)
    plain = re.sub(r"\^\s*\{?\s*(-?\d)\s*\}?", r"^\1 ", plain)
    words: list[str] = []
    power = ""
    for word in re.findall(r"/|\^-?\d|[^\s/^.,()*-]+", plain):
        if word in _POWER_BEFORE:
            power = _POWER_BEFORE[word]
        elif word in _POWER_BEHIND and words:
            words[-1] += _POWER_BEHIND[word]
        elif word.startswith("^") and words:
            words[-1] += word
        else:
            words.append(word if word == "/" else UNIT_NAMES.get(word) or _singular(word))
            if word != "/":
                words[-1], power = words[-1] + power, ""
    if "^" in power and not words:
        words.append(power)
    return re.sub(r"/([a-z]+)/\1$", r"/\1^2", "".join(words))


def _singular(word: str) -> str:
    """Without the ending of a plural; `class` and `gas` stay what they are."""
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("xes", "ches", "shes", "sses")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def drop_assignment(text: str) -> str:
    """`x = 3` -> `3`, `f(x) = 2x` -> `2x`, `(x,y) = (1,2)` and `P(1,2)` -> `(1,2)`; other text unchanged."""
    match = _ASSIGNED.match(text) or _NAMED_POINT.fullmatch(text)
    return match[match.lastindex or 0].strip() if match is not None else text


def assigned_name(text: str) -> str:
    """The variable that a text gives a value to: `x_{1} = 3` -> `x_{1}`; empty for other text."""
    match = _NAME.match(text)
    return match[1] if match is not None and text.count("=") == 1 else ""


def is_thousands(text: str) -> bool:
    return _THOUSANDS.fullmatch(text) is not None


def split_top_level(text: str, separator: str) -> list[str]:
    """Parts of a text between separators that stand in no bracket; brackets of intervals need not match in kind."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        if depth == 0 and text.startswith(separator, position):
            parts.append(text[start:position].strip())
            position += len(separator)
            start = position
            continue
        if text[position] in "([{":
            depth += 1
        elif text[position] in ")]}":
            depth = max(0, depth - 1)
        position += 1
    parts.append(text[start:].strip())
    return parts


def brackets(text: str) -> tuple[str, str, str] | None:
    r"""(opening, inside, closing) when one pair encloses the whole text: `(1,2]`, `\{1,2\}`, `[0,1]`."""
    for opening, closings in (("\\{", ("\\}",)), ("(", (")", "]")), ("[", (")", "]"))):
        if not text.startswith(opening):
            continue
        for closing in closings:
            inside = text[len(opening) : -len(closing)]
            if len(text) > len(opening) and text.endswith(closing) and _balanced(inside):
                return opening, inside.strip(), closing
    return None


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return False
    return depth == 0


def matrix(text: str) -> list[list[str]] | None:
    r"""Rows of a `pmatrix` that is the whole text; None for anything else."""
    match = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text.strip(), re.DOTALL)
    if match is None or "\\begin" in match.group(1):
        return None
    rows = [row for row in match.group(1).split("\\\\") if row.strip()]
    return [[cell.strip() for cell in row.split("&")] for row in rows]


def as_interval(text: str) -> str:
    """An inequality in one variable, the set it describes, or brackets turned outwards at open ends (`]0,1]`), as its
    interval; other text unchanged."""
    turned = [_OUTWARD.fullmatch(part) for part in text.split("\\cup")]
    if all(turned):
        ends = [(each[1].replace("]", "("), each[2], each[3], each[4].replace("[", ")")) for each in turned if each]
        return "\\cup ".join(f"{left}{low},{high}{right}" for left, low, high, right in ends)
    builder = _SET_BUILDER.fullmatch(text.strip())
    if builder is not None and _RELATION.search(builder[2]):
        text = builder[2]
    both = [_BOUND.fullmatch(part) for part in text.split(",")]
    if len(both) == 2 and both[0] and both[1] and both[0][1] == both[1][1]:
        below, above = sorted(both, key=lambda found: found[2] in {"<", "\\le"} if found else False)
        if below and above and below[2] in {">", "\\ge"} and above[2] in {"<", "\\le"}:
            sign = "<" if below[2] == ">" else "\\le "
            text = f"{below[3]}{sign}{below[1]}{above[2]} {above[3]}"
    parts = re.split(r"(\\le(?![a-z])|\\ge(?![a-z])|<|>)", text)
    values = [part.strip() for part in parts[::2]]
    signs = [part.strip() for part in parts[1::2]]
    if len(signs) == 1 and re.fullmatch(r"[a-zA-Z]", values[1]) and not re.fullmatch(r"[a-zA-Z]", values[0]):
        values.reverse()
        signs = [{"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}[signs[0]]]
    if len(signs) == 1 and re.fullmatch(r"[a-zA-Z]", values[0]) and values[1]:
        return {
            "<": f"(-\\infty,{values[1]})",
            "\\le": f"(-\\infty,{values[1]}]",
            ">": f"({values[1]},\\infty)",
            "\\ge": f"[{values[1]},\\infty)",
        }[signs[0]]
    if len(signs) == 2 and re.fullmatch(r"[a-zA-Z]", values[1]) and values[0] and values[2]:
        if set(signs) <= {"<", "\\le"}:
            return f"{'(' if signs[0] == '<' else '['}{values[0]},{values[2]}{')' if signs[1] == '<' else ']'}"
        if set(signs) <= {">", "\\ge"}:
            return f"{'(' if signs[1] == '>' else '['}{values[2]},{values[0]}{')' if signs[0] == '>' else ']'}"
    return text
