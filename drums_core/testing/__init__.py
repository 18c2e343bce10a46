"""What tests of drums, and of plugins for it, are made with."""
