"""The run folder: faults are durable as soon as they are found, readable during the campaign, and can be resumed from.

config.yaml        the options, as `themis run --config` reads them
environment.json   versions, device, and the hashes of model and data
run.sqlite         rounds, faults and the last checkpoint (see schema.py); any SQLite reader opens it
tensors/           inputs and outputs of the most telling faults, as safetensors
state/             the arrays of the last checkpoint
summary.json       the result, once the campaign has stopped
"""
