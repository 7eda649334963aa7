"""Load a model by what the command line gives: a factory, a file, or a name that a package knows."""

from themis.target.loaders.model import LOADERS, PACKAGES, collection, is_file, load_model
from themis.target.loaders.trust import Trust
from themis.target.loaders.weights import load_weights

__all__ = ["LOADERS", "PACKAGES", "Trust", "collection", "is_file", "load_model", "load_weights"]
