"""The gates of the specification, one module and one entry point each, on public `drums_core` names only."""
