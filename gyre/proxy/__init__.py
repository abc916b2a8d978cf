"""The room `proxy`; see the file map in README."""
