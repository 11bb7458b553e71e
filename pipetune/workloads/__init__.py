"""Built-in workloads on real formats: their names, and where each one's `build(**options)` is."""

from collections.abc import Mapping
from types import MappingProxyType

BUILTIN: Mapping[str, str] = MappingProxyType(
    {
        "images": "pipetune.workloads.images:build",
        "memory_images": "pipetune.workloads.memory_images:build",
        "synthetic": "pipetune.workloads.synthetic:build",
        "tabular": "pipetune.workloads.tabular:build",
        "tokens": "pipetune.workloads.tokens:build",
    }
)
"""`builtin:images` and its siblings, as `module:function`; reading this table imports no torch."""
