"""See asyncrl.weight_sync."""

if __name__ == "weight_sync":
    raise ImportError("import this package as asyncrl.weight_sync")
