"""One trial, in one process of its own: the parent's side (runner) and the child's (host)."""
