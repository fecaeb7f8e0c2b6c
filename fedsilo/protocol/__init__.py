"""What two parties must agree on: messages, methods, rounds, audit records, grading. No I/O, no torch."""
