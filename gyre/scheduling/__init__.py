"""The room `scheduling`; see the file map in README."""
