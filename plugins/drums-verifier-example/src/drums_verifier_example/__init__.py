"""Checks of files and folders."""
