"""See asyncrl.configs."""

if __name__ == "configs":
    raise ImportError("import this package as asyncrl.configs")
