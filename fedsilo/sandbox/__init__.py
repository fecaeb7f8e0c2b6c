"""Builds sandboxes, for the trainer and for graded programs, and tries them from inside. Standard library only."""
