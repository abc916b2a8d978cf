"""The room `launch`; see the file map in README."""
