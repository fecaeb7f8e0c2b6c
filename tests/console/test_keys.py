"""Changing keys: not after a screen change, not in a burst."""

from __future__ import annotations

from console.keys import KeyGate


def press(gate: KeyGate, now: float, name: str = "approve") -> str:
    gate.key(now)
    return gate.offer(name, now)


def test_a_key_that_stands_alone_acts_once() -> None:
    gate = KeyGate()
    assert press(gate, 1.0) == ""
    assert gate.settle(1.03) is None
    assert gate.settle(1.05) == "approve"
    assert gate.settle(1.06) is None


def test_a_pasted_run_of_keys_does_nothing_not_even_the_first() -> None:
    gate = KeyGate()
    for index in range(3):
        press(gate, 1.0 + index * 0.001)
    assert gate.settle(2.0) is None


def test_a_key_right_after_takes_the_offer_back() -> None:
    gate = KeyGate()
    assert press(gate, 1.0) == ""
    gate.key(1.01)
    assert gate.settle(2.0) is None


def test_keys_rest_after_a_screen_change() -> None:
    gate = KeyGate()
    gate.screen_changed(1.0)
    assert "look" in press(gate, 1.39)
    assert gate.settle(2.0) is None
    assert press(gate, 1.44) == ""
