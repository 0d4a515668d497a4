"""One module per command: from config to objects to result.json."""
