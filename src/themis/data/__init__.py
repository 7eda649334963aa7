"""Seeds, and the readers that create them from data."""

from themis.data.seeds import Seeds, read_seeds

__all__ = ["Seeds", "read_seeds"]
