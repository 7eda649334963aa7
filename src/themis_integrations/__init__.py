"""What adapts Themis to other people's software and file formats.

Each module is for one package or format, is added to Themis by entry points, as any other package can do it, and is
loaded when it is named. Themis never imports it.
"""
