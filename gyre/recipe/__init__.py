"""The room `recipe`; see the file map in README."""
