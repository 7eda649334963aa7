"""The run folder: every fault durable as it is found, readable by others meanwhile, and a place to go on from.

config.yaml        the options, as `themis run --config` reads them
environment.json   versions, device, and the hashes of model and data
run.sqlite         rounds, faults and the last checkpoint (see schema.py); any SQLite reader opens it
tensors/           inputs and outputs of the most telling faults, as safetensors
state/             the last checkpoint's arrays
summary.json       the result, once the campaign has stopped
"""

from themis.store.reader import Reader
from themis.store.writer import Writer

__all__ = ["Reader", "Writer"]
