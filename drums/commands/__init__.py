"""The commands of the client, each a click command of its own module, found by entry point (`drums.commands`)."""
