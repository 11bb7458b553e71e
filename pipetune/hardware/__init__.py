"""Reads the machine: CPUs, memory and GPUs as far as this process may use them."""
