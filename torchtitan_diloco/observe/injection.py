"""What a chaos run leaves in an island's folder to have something happen inside its trainer (`debug.inject_faults`)."""

INJECT = "inject"
"""File with the word ``nan``; the trainer takes it away once it has obeyed."""
