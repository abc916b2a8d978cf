"""The room `views`; see the file map in README."""
