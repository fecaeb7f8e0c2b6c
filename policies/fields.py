"""Types of a policy file's fields: strict scalars, each with the order by which two files compare (lattice.py)."""

from __future__ import annotations

import calendar
import re
import time
import unicodedata
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from policies import lattice

_SPIFFE = re.compile(r"spiffe://[a-z][a-z0-9_-]{0,62}/(silo|coordinator)/[a-z][a-z0-9_-]{0,62}")
_UTC = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z")


def plain_integer(value: Any) -> Any:
    # Lax validation would take "5", 5.0 and true for 5.
    if type(value) is not int:
        raise ValueError("must be a whole number without unit or quotes")
    return value


def plain_number(value: Any) -> Any:
    if type(value) not in (int, float):
        raise ValueError("must be a number without unit or quotes")
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("must be finite")
    return value


def _plain_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("must be text; quote it")
    return value


def _one_line(value: str) -> str:
    # It stands in lines that people read (T37). Cf holds the marks that reorder or hide text, such as U+202E; the
    # joiners of some scripts are among them, and a policy's words do without. Look-alike letters are not noticed.
    for character in value:
        if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp"):
            raise ValueError(f"must be one line, without control or invisible characters: U+{ord(character):04X}")
    return value


def _plain_boolean(value: Any) -> Any:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def _ascending(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError("the first number of a range is the smaller one")
    return value


def _spiffe(value: str) -> str:
    if not _SPIFFE.fullmatch(value):
        raise ValueError("must look like spiffe://FEDERATION/silo/NAME or spiffe://FEDERATION/coordinator/NAME")
    return value


def _utc(value: str) -> str:
    if not is_utc(value):
        raise ValueError('must look like "2027-06-01T00:00:00Z"')
    time.strptime(value, "%Y-%m-%dT%H:%M:%SZ")
    return value


def is_utc(value: str) -> bool:
    return bool(_UTC.fullmatch(value))


def epoch_seconds(utc: str) -> int:
    return calendar.timegm(time.strptime(utc, "%Y-%m-%dT%H:%M:%SZ"))


# RFC 8785 carries twice as much: what a message adds to a count that is at its limit fits, too.
Integer = Annotated[int, BeforeValidator(plain_integer), Field(ge=0, le=2**52 - 1)]
Positive = Annotated[int, BeforeValidator(plain_integer), Field(ge=1, le=2**52 - 1)]
Number = Annotated[float, BeforeValidator(plain_number)]
NotNegative = Annotated[float, BeforeValidator(plain_number), Field(ge=0)]
Boolean = Annotated[bool, BeforeValidator(_plain_boolean)]
Text = Annotated[str, BeforeValidator(_plain_text), Field(max_length=256), AfterValidator(_one_line)]
Sha256 = Annotated[str, BeforeValidator(_plain_text), Field(pattern=r"^[0-9a-f]{64}$")]
SpiffeId = Annotated[str, BeforeValidator(_plain_text), AfterValidator(_spiffe)]
UtcTime = Annotated[str, BeforeValidator(_plain_text), AfterValidator(_utc)]
IntegerRange = Annotated[tuple[Integer, Integer], AfterValidator(_ascending)]
NumberRange = Annotated[tuple[Number, Number], AfterValidator(_ascending)]


# The same with the order in which they tighten: a largest allowed number, a smallest required one, and so on.
Limit = Annotated[Integer, lattice.SMALLEST]
PositiveLimit = Annotated[Positive, lattice.SMALLEST]
NormLimit = Annotated[NotNegative, lattice.SMALLEST]
Least = Annotated[Positive, lattice.LARGEST]
Pinned = Annotated[Sha256, lattice.SAME]
PinnedText = Annotated[Text, lattice.SAME]
PinnedNumber = Annotated[Positive, lattice.SAME]
Label = Annotated[Text, lattice.LABEL]
Range = Annotated[IntegerRange, lattice.OVERLAP]
FloatRange = Annotated[NumberRange, lattice.OVERLAP]
ShareLimit = Annotated[float, BeforeValidator(plain_number), Field(ge=0, le=1), lattice.SMALLEST]
Demand = Annotated[Boolean, lattice.BOTH]


def is_zero(value: object) -> bool:
    """Return whether a number is 0: as the default of a later key, it is in no digest."""
    return value == 0


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)


class Approvals(Closed):
    """Which rounds wait for people. first_rounds: rounds 1..n wait for people; then: so do rounds n, 2n, 3n, ...; 0 is
    none. roles: whose yes counts, besides that the person may give one at all (`release.approve` of `certs.roles`): so
    `[site-admin]` asks for an approver who is a site-admin, too."""

    first_rounds: Integer
    then: Integer  # ordered together with first_rounds: lattice.rhythm
    persons: Least
    roles: Annotated[
        tuple[Literal["approver", "site-admin", "operator"], ...], Field(min_length=1), lattice.INTERSECTION
    ]


class MetricField(Closed):
    min: Annotated[Number, lattice.LARGEST]
    max: Annotated[Number, lattice.SMALLEST]
    quantum: Annotated[float, BeforeValidator(plain_number), Field(gt=0), lattice.MULTIPLE]


class Grid(MetricField):
    """Numbers from min to max on whole multiples of the quantum."""

    @model_validator(mode="after")
    def _has_values(self) -> Grid:
        if self.min > self.max:
            raise ValueError("min is above max")
        return self


Quantum = Annotated[float, BeforeValidator(plain_number), Field(gt=0), lattice.MULTIPLE]
Permission = Annotated[Literal["denied", "allowed"], lattice.ladder("denied", "allowed")]
