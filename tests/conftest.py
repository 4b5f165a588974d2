"""Its place makes `tests` importable, so that every test finds the package `tiny`."""
