"""The host's commands, each an entry point of `drums.commands`."""
