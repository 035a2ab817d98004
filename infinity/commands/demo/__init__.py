"""``infinity demo``: train a byte-level GPT of 100M parameters from NVMe, on text that every machine has."""

from infinity.commands.demo.run import main

__all__ = ["main"]
