"""Frozen values and pure decisions: no torch, no optuna, no files, no clock."""
