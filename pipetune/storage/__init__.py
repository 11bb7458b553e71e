"""The Optuna storage, which is the one record of a study, and the folder around it."""
