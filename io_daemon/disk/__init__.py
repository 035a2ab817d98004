"""Swap files and the directories they lie in."""
