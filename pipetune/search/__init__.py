"""The head: what to measure next, when to stop, and which configuration to name."""
