"""Checks of rows before a run learns from them: `command` is the command line, the other files are checks and parts.

The package belongs to the command line: it reads rows with `datamodules`, and nothing else imports it.
"""
