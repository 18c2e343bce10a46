"""The set-up step types that come with drums, one plugin each."""
