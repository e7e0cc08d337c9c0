"""See asyncrl.losses."""

if __name__ == "losses":
    raise ImportError("import this package as asyncrl.losses")
