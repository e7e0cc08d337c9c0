"""Where coding tasks come from: one module, or a few, for each set; the table of their names is in `coding.bundled`."""
