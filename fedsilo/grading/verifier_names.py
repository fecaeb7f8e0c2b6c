"""A verifier in a configuration file: a name, a mixture such as `math*0.9+format*0.1`, or a mapping {name: weight}.

Used as the type of a field; a wrong one is an error with file and line (`protocol.strict_yaml`) and the list of names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from fedsilo.grading import mixture, require_verifier
from fedsilo.grading.own_verifiers import find_verifier
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.strict_yaml import WrongValueError


def name_in_file(value: Any, look_up: Callable[[str], object]) -> str:
    """The name that a file's value stands for.

    Args:
        value: a text, or a mapping {name: weight} whose order is kept.
        look_up: raises UsageError for a name that there is not.

    Raises:
        WrongValueError: it is none.
    """
    try:
        if isinstance(value, Mapping):
            weights = dict(value)
            if not weights or not all(isinstance(each, str) for each in weights):
                raise UsageError("a mixture is a mapping of names to weights", hint="as in: {math: 0.9, format: 0.1}")
            if any(isinstance(each, bool) or not isinstance(each, int | float) for each in weights.values()):
                raise UsageError("the weights of a mixture must be numbers", hint="as in: {math: 0.9, format: 0.1}")
            value = mixture.name_of(weights)
        if not isinstance(value, str):
            raise UsageError("must be a name or a mapping of names to weights", hint="as in: math")
        look_up(value)
    except UsageError as error:
        raise WrongValueError(error.message, error.hint) from error
    return value


# Also what packages bring (own_verifiers.py): at a silo.
AnyVerifier = Annotated[str, BeforeValidator(lambda value: name_in_file(value, find_verifier))]
# FedSilo's own parts only: where no code of a site may be loaded.
OwnPartsVerifier = Annotated[str, BeforeValidator(lambda value: name_in_file(value, require_verifier))]
