"""See asyncrl.sandbox."""

if __name__ == "sandbox":
    raise ImportError("import this package as asyncrl.sandbox")
