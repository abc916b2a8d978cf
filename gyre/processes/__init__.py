"""The room `processes`; see the file map in README."""
