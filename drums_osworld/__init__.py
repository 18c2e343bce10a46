"""OSWorld for drums: its tasks, the set-up steps that they use, and its unmodified functions as a checker."""
