"""See asyncrl.buffers."""

if __name__ == "buffers":
    raise ImportError("import this package as asyncrl.buffers")
