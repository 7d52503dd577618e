"""Finding, parsing and watching files: discovery with ignore rules, parsing processes, `--watch`."""
