"""Models by what the command line says: a factory, a file, or a name that a package knows."""

from themis.models.loading import FILES, PACKAGES, is_file, load_model
from themis.models.trust import Trust
from themis.models.weights import load_weights

__all__ = ["FILES", "PACKAGES", "Trust", "is_file", "load_model", "load_weights"]
