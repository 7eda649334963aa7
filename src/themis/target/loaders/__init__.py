"""Load a model by what the command line gives: a factory, a file, or a name that a package knows."""

from themis.target.loaders.model import FILE_LOADERS, LOADERS, PACKAGES, collection, is_file, load_model
from themis.target.loaders.weights import Trust, load_weights

__all__ = ["FILE_LOADERS", "LOADERS", "PACKAGES", "Trust", "collection", "is_file", "load_model", "load_weights"]
