"""What parties must agree on: messages, methods, rounds, plans. No I/O, no torch."""
