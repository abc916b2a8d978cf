"""The room `cli`; see the file map in README."""
