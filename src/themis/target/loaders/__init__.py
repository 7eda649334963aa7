"""Loading models named on the command line: by a factory, a file, or a name in a package."""

from themis.target.loaders.model import FILE_LOADERS, LOADERS, PACKAGES, collection, is_file, load_model
from themis.target.loaders.weights import Trust, load_weights

__all__ = ["FILE_LOADERS", "LOADERS", "PACKAGES", "Trust", "collection", "is_file", "load_model", "load_weights"]
