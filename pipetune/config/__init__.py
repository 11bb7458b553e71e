"""The door for YAML: config files in, result files out, both checked completely."""
