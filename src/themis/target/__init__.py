"""The model under test: loading, running, tracing and identifying it."""
