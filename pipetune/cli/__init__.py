"""The command line: one thin file a verb, and the exit codes."""
