"""The page cache before the first trial: what was read ahead, and what trials read because of that."""

from dataclasses import dataclass
from enum import StrEnum


class ReadAheadEnd(StrEnum):
    """Why reading ahead ended."""

    IN_MEMORY = "in_memory"
    WHOLE_EPOCH = "whole_epoch"
    TIME = "time"
    MEMORY = "memory"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """Samples read before the first trial, bytes of them that came from storage, and why it went no further."""

    samples: int
    read_bytes: int
    seconds: float
    end: ReadAheadEnd

    @property
    def bounds_samples(self) -> bool:
        """Whether trials must keep to what was read ahead, for only that is in memory."""
        return self.end is ReadAheadEnd.TIME

    @property
    def stays_cold(self) -> bool:
        """Whether the dataset is larger than memory, so that training will read from storage too."""
        return self.end is ReadAheadEnd.MEMORY

    def sentence(self) -> str | None:
        """One line for people; None where there is nothing to tell."""
        size = f"{self.samples:,} samples ({self.read_bytes / 2**20:,.0f} MiB from storage, {self.seconds:.0f} s)"
        match self.end:
            case ReadAheadEnd.IN_MEMORY if self.read_bytes < 2**24:
                return None
            case ReadAheadEnd.IN_MEMORY:
                return f"nothing came from storage any more after {size} had been read ahead"
            case ReadAheadEnd.WHOLE_EPOCH:
                return f"the dataset was read into the page cache before the first trial: {size}"
            case ReadAheadEnd.TIME:
                return f"a part of the dataset was read into the page cache, and trials read only that: {size}"
            case ReadAheadEnd.MEMORY:
                return f"the dataset does not fit into memory: each trial reads samples not read before, after {size}"
            case ReadAheadEnd.UNKNOWN:
                return "what comes from storage cannot be seen here: trials are not labelled warm or cold"
