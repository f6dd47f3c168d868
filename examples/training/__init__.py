"""Training of a GPT-2-sized decoder."""
