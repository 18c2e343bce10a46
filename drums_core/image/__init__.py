"""Images: recipes, and the root file systems that are built from them."""
