"""The model under test: how it is loaded, fed, traced and identified."""
