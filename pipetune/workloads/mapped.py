"""Array files that are mapped into memory by each process for itself, and travel to workers as a path."""

from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class MappedArray:
    """A read-only array in a file: `.npy`, or raw numbers of the given type in anything else."""

    def __init__(self, path: Path, dtype: str | None = None) -> None:
        self.path = path
        self._dtype = dtype
        self._array: Array | None = None

    @property
    def array(self) -> Array:
        """The mapped array; opened at the first use in this process."""
        if self._array is None:
            self._array = self._open()
        return self._array

    def _open(self) -> Array:
        # A plain view: indexing a numpy.memmap itself costs a microsecond of bookkeeping each time.
        if self._dtype is None:
            loaded: Array = np.load(self.path, mmap_mode="r", allow_pickle=False)
            return loaded.view(np.ndarray)
        return np.memmap(self.path, dtype=self._dtype, mode="r").view(np.ndarray)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}  # numpy would pickle the content of the file
