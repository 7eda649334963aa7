"""Data: seeds, and readers that make them."""

from themis.data.seeds import Seeds, read_seeds

__all__ = ["Seeds", "read_seeds"]
